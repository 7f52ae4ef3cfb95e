"""`kvguard analyze`: what the history of requests says, as tables or JSON."""

import re
from typing import Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from guard.cli.errors import FAILED, USAGE, fail
from guard.cli.show import console, dump, ratio, seconds, table


def show(place: str, before: str | None, after: str | None, limit: int, *, as_json: bool) -> None:
    """Prints the analysis; ends with 1 where something got slower."""
    for day in (before, after):
        if day is not None and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", day):
            fail(f"{day!r} is not a day", "write it as 2026-12-01", code=USAGE)
    report = _report(place, before, after, limit)
    if as_json:
        dump(report)
    else:
        _print(report)
    if any(row["verdict"] == "slower" for row in report["regressions"]):
        raise typer.Exit(FAILED)


def _report(place: str, before: str | None, after: str | None, limit: int) -> dict[str, Any]:
    from guard.history import analysis

    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=_stderr(), transient=True
    ) as progress:
        task = progress.add_task("looking for days")
        try:
            requests = analysis.scan(place)
            held = analysis.days(requests, place)
            first, second = _two(dict(held), before, after)
            progress.update(task, description=f"comparing {second} with {first}")
            changed = analysis.regressions(requests, first, second) if first else []
            progress.update(task, description="the slowest requests")
            slowest = analysis.slowest(requests, limit)
            progress.update(task, description="what hits were worth")
            worth = analysis.hit_value(requests)
        except analysis.HistoryError as error:
            fail(str(error), "give the history_dir of a service, or a pattern that names its files")
    return {
        "days": [{"day": day, "n": count} for day, count in held],
        "before": first or None,
        "after": second,
        "regressions": changed,
        "slowest": slowest,
        "hit_value": worth,
    }


def _two(held: dict[str, int], before: str | None, after: str | None) -> tuple[str, str]:
    """The days to compare; the first is empty where there is only one."""
    for day in (before, after):
        if day is not None and day not in held:
            fail(f"{day}: no requests of that day", f"there are: {', '.join(held)}", code=USAGE)
    last = after or max(held)
    earlier = [day for day in held if day < last]
    return before or (max(earlier) if earlier else ""), last


def _print(report: dict[str, Any]) -> None:
    out = console()
    out.print(table(("day", "requests>"), [(row["day"], f"{row['n']:,}") for row in report["days"]]))
    if report["before"]:
        told = [row for row in report["regressions"] if row["verdict"] in ("slower", "faster")]
        rest = len(report["regressions"]) - len(told)
        title = f"\n{report['after']} against {report['before']}, blocks of 10 minutes, 95 % intervals; measured"
        out.print(table(_CHANGES, [_change(row) for row in told], title=title))
        out.print(f"{rest} others: no change beyond 5 % that is sure, or too little data (--json has them)")
    else:
        out.print("\nonly one day: nothing to compare with")
    out.print(table(_SLOWEST, [_slow(row) for row in report["slowest"]], title="\nslowest requests; measured"))
    title = "\nworth of remote hits by length of the prefix, seconds of TTFT saved per hit; projected"
    out.print(table(_WORTH, [_worth(row) for row in report["hit_value"]], title=title))


_CHANGES = ("verdict", "what", "model", "backend", "class", "road", "before>", "after>", "ratio>", "interval>", "n>")
_SLOWEST = ("TTFT>", "queue>", "lookup>", "fetch>", "prefill>", "road", "engine", "class", "arrival", "request")
_WORTH = ("prefix", "hits>", "saved per hit>", "interval>", "won>", "exposed wait>", "saved in all>", "not projected>")


def _change(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["verdict"], row["measure"], row["model"], row["backend"], row["class"], row["decision"],
        seconds(row["before_seconds"]), seconds(row["after_seconds"]), f"x{row['ratio']:.2f}",
        f"{row['low']:.2f} to {row['high']:.2f}", f"{row['n_before']:,} + {row['n_after']:,}",
    )  # fmt: skip


def _slow(row: dict[str, Any]) -> tuple[object, ...]:
    times = (seconds(row[name]) for name in ("ttft", "queue", "lookup", "fetch", "prefill"))
    name = row["request_id"] or row["trace_id"]
    return (*times, row["decision"], row["engine_id"], row["class"], row["arrival"][:19] + "Z", name)


def _worth(row: dict[str, Any]) -> tuple[object, ...]:
    known = row["low"] is not None
    return (
        row["prefix"], f"{row['n']:,}", seconds(row["value_seconds"]),
        f"{seconds(row['low'])} to {seconds(row['high'])}" if known else "too little data", ratio(row["share_won"]),
        seconds(row["exposed_wait_seconds"]), seconds(row["total_seconds"]), f"{row['outside']:,}",
    )  # fmt: skip


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)
