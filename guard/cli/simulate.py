"""`kvguard simulate`: which policy, at which RTT, for which trace; every figure is simulated."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from guard.cli.errors import USAGE, fail
from guard.cli.show import console, dump, ratio, seconds, table
from guard.errors import ConfigError
from guard.simulate import results, scenario
from guard.simulate.run import POLICIES, simulate
from guard.simulate.scenario import Scenario
from guard.simulate.units import seconds as parse_seconds

COLUMNS = (
    "RTT>", "policy", "TTFT mean>", "p50>", "p95>", "p99>", "TPOT>", "within SLA>", "goodput>", "read>", "regret>",
    "remote>", "unanswered>",
)  # fmt: skip


def run(
    name: str | None,
    trace: Path | None,
    rtts: str,
    policies: str,
    engines: int | None,
    seed: int | None,
    sla: str | None,
    *,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Runs every policy at every RTT and shows the table, the JSON or the plot."""
    try:
        base = _base(name, trace, engines, seed, sla)
        at: list[float | None] = [_time("--rtt", each) for each in rtts.split(",")] if rtts else [None]
        wanted = _policies(policies)
        pyplot = _pyplot() if plot else None
        found = _all(base, at, wanted)
    except ConfigError as error:
        fail(str(error), "docs/simulate.md explains the keys", code=USAGE)
    if as_json:
        dump({"source": "simulated", "scenario": base.title, "results": found})
    else:
        out = console()
        out.print(f"SIMULATED, not measured: {base.title}; SLA: TTFT <= {seconds(base.objective.ttft)}", markup=False)
        out.print(table(COLUMNS, [_row(each) for each in found]))
    if pyplot is not None and plot is not None:
        _draw(pyplot, found, base, plot)


def _time(option: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(option, str(error)) from None


def _base(name: str | None, trace: Path | None, engines: int | None, seed: int | None, sla: str | None) -> Scenario:
    if (name is None) == (trace is None):
        raise ConfigError("simulate", f"give a scenario ({', '.join(scenario.names())}, or a file) or --trace FILE")
    if trace is not None:
        data: dict[str, Any] = {"title": trace.name, "seconds": "24h", "workload": {"kind": "trace", "path": trace}}
        if trace.suffix == ".jsonl":
            data["connector"] = {"chunk_tokens": 512}
        base = scenario.parse(data)
    else:
        base = scenario.load(str(name))
    update: dict[str, Any] = {}
    if engines is not None:
        if engines < 1:
            raise ConfigError("--engines", "give at least 1")
        update["engine"] = base.engine.model_copy(update={"count": engines})
    if seed is not None:
        update["seed"] = seed
    if sla is not None:
        update["objective"] = base.objective.model_copy(update={"ttft": _time("--sla", sla)})
    return base.model_copy(update=update)


def _policies(text: str) -> list[str]:
    wanted = text.split(",") if text != "all" else list(POLICIES)
    for each in wanted:
        if each not in POLICIES:
            raise ConfigError("--policy", f"{each!r} is not one of all, {', '.join(POLICIES)}")
    return wanted


def _all(base: Scenario, rtts: Sequence[float | None], policies: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with Progress(console=_errors(), transient=True) as progress:
        task = progress.add_task("simulating", total=len(rtts) * len(policies))
        for rtt in rtts:
            here = base
            if rtt is not None:
                here = base.model_copy(update={"link": base.link.model_copy(update={"rtt": rtt})})
            done = []
            for policy in policies:
                done.append(simulate(here, policy))
                progress.advance(task)
            regrets = results.regret(done)
            found += [{"rtt": here.link.rtt, **each.summary(), "regret": regrets[each.policy]} for each in done]
    return found


def _errors() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _row(each: dict[str, Any]) -> tuple[Any, ...]:
    remote = each["decisions"].get("remote", 0) / max(1, each["requests"])
    return (
        seconds(each["rtt"]), each["policy"], *(seconds(each[f"ttft_{key}"]) for key in ("mean", "p50", "p95", "p99")),
        seconds(each["tpot_mean"]), ratio(each["good"]), f"{each['goodput']:.2f}/s", f"{each['bytes'] / 1e9:.1f} GB",
        f"{each['regret']:.2f}" if math.isfinite(each["regret"]) else "-", ratio(remote), each["unanswered"],
    )  # fmt: skip


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--plot", "needs matplotlib: pip install 'kvguard[report]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(pyplot: Any, found: list[dict[str, Any]], base: Scenario, path: Path) -> None:
    """TTFT mean and share within the SLA over RTT, a line per policy; bars where there is one RTT."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    names = list(dict.fromkeys(each["policy"] for each in found))
    many = len({each["rtt"] for each in found}) > 1
    for axis, key, label in ((axes[0], "ttft_mean", "mean TTFT, s"), (axes[1], "good", "share within SLA")):
        for name in names:
            rows = [each for each in found if each["policy"] == name]
            values = [each[key] if each[key] is not None else math.nan for each in rows]
            if many:
                axis.plot([each["rtt"] * 1e3 for each in rows], values, marker="o", label=name)
            else:
                axis.bar(name, values[0])
        axis.set_ylabel(label)
        axis.tick_params(axis="x", rotation=0 if many else 30)
        if many:
            axis.set_xscale("log")
            axis.set_xlabel("idle RTT, ms")
            axis.legend(fontsize=8)
    figure.suptitle(f"SIMULATED: {base.title} (SLA {seconds(base.objective.ttft)})", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
