"""`kvguard explain REQUEST`."""

from typing import Any

from rich.console import Console

from guard.cli.client import Client, segment
from guard.cli.show import at, console, dump, ratio, seconds, table

BAR = 40


def show(client: Client, request: str, *, as_json: bool) -> None:
    """Prints the timeline of every choice of the request, and what it says in words."""
    data = client.get(f"/v1/requests/{segment(request)}")
    if as_json:
        dump(data)
        return
    out = console()
    for number, entry in enumerate(data["requests"]):
        if number:
            out.print()
        _entry(out, entry)


def _entry(out: Console, entry: dict[str, Any]) -> None:
    tokens = entry["tokens"]
    label = " (simulated)" if entry["simulated"] else ""
    out.print(f"request {entry['request_id'] or entry['internal_id']}{label}", style="bold", markup=False)
    out.print(
        f"  internal id {entry['internal_id']}, trace {entry['trace_id']}\n"
        f"  {entry['engine_id']}, {entry['model']}, {entry['backend'] or 'no remote tier'}, class {entry['class']},"
        f" arrived {at(entry['arrival'])}\n"
        f"  {tokens['prompt']} prompt tokens: {tokens['local']} local, {tokens['remote_loaded']} of"
        f" {tokens['remote_matched']} matched loaded from remote, {tokens['computed']} computed\n"
        f"  decision {entry['decision']}{': ' + entry['reason'] if entry['reason'] else ''};"
        f" TTFT {seconds(entry['ttft_seconds'])}, of it exposed wait {seconds(entry['exposed_wait_seconds'])},"
        f" unexplained {seconds(entry['residual_seconds'])}",
        markup=False,
    )
    total = entry["ttft_seconds"] or sum(part["seconds"] for part in entry["timeline"]) or 1.0
    out.print(table(
        ("part", "takes>", "of TTFT>", "", "what it is"),
        [
            (part["part"], seconds(part["seconds"]), ratio(part["seconds"] / total), _bar(part, total), part["meaning"])
            for part in entry["timeline"]
        ],
    ))  # fmt: skip
    if entry["fetches"]:
        out.print(table(
            ("fetch", "outcome", "took>", "tokens>", "bytes>", "round trips>", "RTT>"),
            [
                (one["attempt"], one["outcome"], seconds(one["seconds"]), one["tokens"], one["bytes"],
                 one["round_trips"], seconds(one["network_rtt_seconds"]))
                for one in entry["fetches"]
            ],
        ))  # fmt: skip
    other = entry.get("other_road")
    if other and other["ttft_seconds"]["value"] is not None:
        told = other["ttft_seconds"]
        out.print(
            f"  the other road, {other['choice']}: TTFT {seconds(told['value'])} projected"
            f" [{seconds(told['low'])} to {seconds(told['high'])}], from {told['n']} requests",
            markup=False,
        )
    for sentence in entry["words"]:
        out.print(f"  - {sentence}", markup=False)


def _bar(part: dict[str, Any], total: float) -> str:
    start = min(BAR, max(0, round(part["start_seconds"] / total * BAR)))
    length = min(BAR - start, max(0, round(part["seconds"] / total * BAR)))
    bar: str = " " * start + "#" * length
    return bar.ljust(BAR)
