"""`kvguard sweep`: the acceptance test of a remote tier, against a live engine."""

import json
import os
import platform
import ssl
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from guard import __version__
from guard.cli.show import console, dump, table
from guard.cli.signals import end_as_ctrl_c
from guard.estimate.shapes import Figure
from guard.probe import registry
from guard.probe.prober import Target
from guard.sweep import analysis, injector, report
from guard.sweep.analysis import Curve, three_digits
from guard.sweep.engine import Engine
from guard.sweep.plan import Plan
from guard.sweep.results import Results, load
from guard.sweep.runner import Sweep
from guard.sweep.service import Service

PINGS = 10


def run(
    plan: Plan,
    *,
    engine_url: str,
    service_url: str,
    token: str,
    verify: ssl.SSLContext | bool,
    api_key: str,
    scope: str,
    injector_text: str,
    probe: str,
    resets: tuple[tuple[str, str], ...],
    out: Path,
) -> list[Curve]:
    """Measures what is missing in `out` and writes the report there; returns the curves.

    Raises:
        ConfigError: an option cannot be used; names it.
        SweepError: something does not work as it must; the road and the switch are put back.
    """
    report.require_plots()
    end_as_ctrl_c()
    rtt = _prober(probe)
    road = injector.parse(injector_text)
    with (
        Engine(engine_url, resets, api_key=api_key) as engine,
        Service(service_url, token=token, scope=scope, verify=verify) as service,
    ):
        results = Results(out, plan, _facts(engine.model, injector_text, probe))
        cells = list(plan.cells())
        with _progress() as progress:
            task = progress.add_task("starting", total=len(cells), completed=len(results.cells))

            def told(step: str) -> None:
                progress.update(task, description=step, completed=len(results.cells))

            Sweep(plan, engine, service, road, results, rtt=rtt, told=told).run()
        estimated = service.inflection()
    facts, measured = load(out)
    curves = analysis.curves(measured)
    report.write(out, curves, {**facts, "estimated": estimated})
    return curves


def show(out: Path, curves: list[Curve], *, as_json: bool) -> None:
    """Prints the answers."""
    if as_json:
        dump(json.loads((out / report.JSON).read_text("utf-8")))
        return
    heads = (
        "concurrency>",
        "recompute>",
        "remote, fastest>",
        "departs at RTT>",
        "stops paying at RTT>",
        "round trips>",
    )
    rows = [
        (
            curve.concurrency, _cell(curve.recompute), _cell(curve.tiers[0].remote) if curve.tiers else "-",
            _cell(curve.departure), _cell(curve.break_even), _cell(curve.round_trips, 1.0, ""),
        )
        for curve in curves
    ]  # fmt: skip
    printed = console()
    printed.print(table(heads, rows, title="medians in ms with 95 % intervals (source: measured)"))
    for curve in curves:
        printed.print(curve.words, markup=False)
    printed.print(f"report: {out / report.HTML}", markup=False)


def _cell(figure: Figure, scale: float = 1e3, unit: str = " ms") -> str:
    if figure.value is None:
        return figure.reason or "-"
    low = "" if figure.low is None else three_digits(figure.low * scale)
    high = "beyond" if figure.high is None else three_digits(figure.high * scale)
    return f"{three_digits(figure.value * scale)} [{low}, {high}]{unit}"


def _prober(text: str) -> Callable[[], float | None]:
    """Measures the least of some round trips to the target named as PROBER=TARGET; nothing without one."""
    if not text:
        return lambda: None
    kind, _, target = text.partition("=")
    prober = registry.make(Target(target=target, prober=kind))

    def least() -> float | None:
        sample = prober.probe(PINGS, 2.0)
        return min(sample.rtts, default=None)

    return least


def _facts(model: str, injector_text: str, probe: str) -> dict[str, Any]:
    return {
        "model": model,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "kvguard": __version__,
        "injector": injector_text.partition(":")[0],
        "rtt_from": probe.partition("=")[0] or "what was added",
    }


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
