"""`kvguard advise`: stay local, go remote, or measure first."""

from typing import Any

from guard.classes import class_of
from guard.cli.client import Client
from guard.cli.errors import fail
from guard.cli.show import console, dump, table
from guard.estimate.advice import Situation, advise
from guard.estimate.shapes import FetchModel, Figure, LookupModel, PrefillModel


def show(
    client: Client, *, model: str | None, backend: str | None, rtt: float | None, prompt: int | None,
    concurrency: int | None, sla: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Prints the advice for each backend and the rules behind it."""
    given = {key: value for key, value in (("model", model), ("backend", backend)) if value is not None}
    cells = client.get("/v1/inflection", given)["cells"]
    pools = [cell for cell in cells if cell["class"] == "all"]
    if not pools:
        fail(
            "nothing was estimated" + "".join(f" for {key} {value}" for key, value in given.items()) + " yet",
            "send traffic with offload on, then ask again; kvguard sweep measures one by one",
        )
    answers = []
    for pool in pools:
        cell, own = _cell_for(pool, cells, prompt, concurrency)
        answers.append({
            "model": pool["model"], "backend": pool["backend"], "class": cell["class"],
            **advise(situation(cell, own=own, rtt=rtt, prompt=prompt, concurrency=concurrency, sla=sla)),
        })  # fmt: skip
    if as_json:
        dump({"advice": answers})
        return
    out = console()
    for answer in answers:
        out.print(f"{answer['backend']} ({answer['model']}, class {answer['class']}): {answer['advice']}", style="bold")
        if answer["expected_by_priors"]:
            out.print(f"  until it is measured, the published criteria speak for: {answer['expected_by_priors']}")
        out.print(table(
            ("rule", "speaks for", "source", "because"),
            [(rule["rule"], rule["speaks_for"], rule["source"], rule["text"]) for rule in answer["rules"]],
        ))  # fmt: skip


def situation(
    cell: dict[str, Any],
    *,
    own: bool,
    rtt: float | None,
    prompt: int | None,
    concurrency: int | None,
    sla: float | None,
) -> Situation:
    """What the API says of a class, as the rules want it. `rtt` given: what if the RTT were that."""
    at = rtt if rtt is not None else cell["rtt"]["now"]
    remote, recompute, net = _projected(cell, at, prompt, concurrency)
    return Situation(
        rtt=at, departure=Figure(**cell["departure"]), break_even=Figure(**cell["break_even"]),
        net_cost=Figure(**cell["net_cost"]) if rtt is None else net, remote_ttft=remote, recompute_ttft=recompute,
        sla=sla, concurrency=concurrency, prompt_tokens=prompt, least_tokens=Figure(**cell["least_tokens"]),
        own_class=own,
    )  # fmt: skip


def _projected(
    cell: dict[str, Any], rtt: float | None, prompt: int | None, concurrency: int | None
) -> tuple[float | None, float | None, Figure]:
    nothing = Figure(value=None, reason="what if: judged by break-even")
    models, reference = cell["models"], cell["reference"]
    if rtt is None or None in models.values() or not reference["prompt_tokens"]:
        return None, None, nothing
    fetch, lookup, prefill = (
        FetchModel(**models["fetch"]), LookupModel(**models["lookup"]), PrefillModel(**models["prefill"])
    )  # fmt: skip
    scale = (prompt or reference["prompt_tokens"]) / reference["prompt_tokens"]
    n, local, matched = (reference[name] * scale for name in ("prompt_tokens", "local_tokens", "matched_tokens"))
    size, running = matched * reference["bytes_per_token"], float(concurrency or 1)
    read = lookup.seconds(rtt, size) + fetch.seconds(rtt, size)
    return (
        read + prefill.seconds(n, max(n - local - matched, 1.0), running),
        prefill.seconds(n, n - local, running),
        nothing,
    )


def _cell_for(
    pool: dict[str, Any], cells: list[dict[str, Any]], prompt: int | None, concurrency: int | None
) -> tuple[dict[str, Any], bool]:
    if prompt is None and concurrency is None:
        return pool, True
    wanted = class_of(prompt or round(pool["reference"]["prompt_tokens"]), concurrency or 1)
    for cell in cells:
        if (cell["model"], cell["backend"], cell["class"]) == (pool["model"], pool["backend"], wanted):
            return cell, not cell["pooled"]
    return pool, False
