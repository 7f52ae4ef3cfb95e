"""`kvguard inflection`."""

from typing import Any

from guard.cli.client import Client
from guard.cli.show import console, dump, fitting, seconds

COLUMNS = (
    "backend", "class", "n>", "RTT now>", "RTT seen>", "departure>", "break-even>", "knee>", "round trips>",
    "net cost>", "state", "cause",
)  # fmt: skip
OPTIONAL = ("RTT seen>", "round trips>", "cause", "net cost>", "knee>")


def show(
    client: Client, *, model: str | None, backend: str | None, class_: str | None, everything: bool, as_json: bool
) -> None:
    """Prints where TTFT departs and where offload stops paying, with intervals and sources."""
    given = {"model": model, "backend": backend, "class": class_}
    params = {key: value for key, value in given.items() if value is not None}
    data = client.get("/v1/inflection", params)
    if as_json:
        dump(data)
        return
    out = console()
    cells = [cell for cell in data["cells"] if everything or class_ or cell["class"] == "all" or not cell["pooled"]]
    if not cells:
        if params:
            asked = ", ".join(f"{key} {value}" for key, value in params.items())
            out.print(f"nothing was estimated for {asked}; kvguard inflection --all shows what there is", markup=False)
        else:
            out.print("nothing was estimated yet: no request with a remote tier has been seen")
        return
    out.print(fitting(out, COLUMNS, [_row(cell) for cell in cells], OPTIONAL))
    out.print("(prior): published by one report for one system, not measured here. (projected): beyond the RTT seen.")
    for cell in cells:
        label = " SIMULATED" if cell["simulated"] else ""
        out.print(f"  {cell['backend']} {cell['class']}{label}: {cell['verdict']['reason']}", markup=False)


def _row(cell: dict[str, Any]) -> tuple[Any, ...]:
    rtt = cell["rtt"]
    seen = f"{seconds(rtt['low'])} to {seconds(rtt['high'])}" if rtt["low"] is not None else "-"
    trips = cell["serial_round_trips"]
    return (
        cell["backend"], cell["class"] + (" (pool)" if cell["pooled"] else ""), cell["n"], seconds(rtt["now"]), seen,
        figure(cell["departure"]), figure(cell["break_even"]), figure(cell["knee"]),
        "-" if trips["value"] is None else f"{trips['value']:.3g}", seconds(cell["net_cost"]["value"]),
        cell["verdict"]["state"], cell["verdict"]["cause"],
    )  # fmt: skip


def figure(data: dict[str, Any]) -> str:
    """A figure with its interval, and its source where it is not measured."""
    if data["value"] is None:
        return "none" if data["reason"].startswith(("none", "no-knee")) else "-"
    text = seconds(data["value"])
    if data["low"] is not None or data["high"] is not None:
        high = seconds(data["high"]) if data["high"] is not None else "open"
        text += f" [{seconds(data['low'])} to {high}]"
    return text if data["source"] == "measured" else f"{text} ({data['source']})"
