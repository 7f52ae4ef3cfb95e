"""The policies on simulated engines: the public matrix, the goodput of every scenario, the steps. `make policies`.

Everything here is simulated. `--small` is what CI can afford; the full form takes many minutes. With KVGUARD_TRACES
naming a directory with the public traces, Mooncake's conversation trace is run too. `--only lab --sweep PATH` asks
whether the model, fitted to one part of a measured sweep, reproduces the rest of it.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.gate import TRICKLE
from guard.simulate import fit, scenario
from guard.simulate.results import Result
from guard.simulate.run import learn, simulate
from guard.simulate.scenario import Conversations, Scenario

FIXED = ("always", "never")
RIVALS = ("threshold", "static", "deadline")

# Public acceptance matrix of llm-d-router PR 2833: TTFT in ms, mean and p99, forced (= always) and recompute (= never).
MATRIX = {
    "1K_C64": ((196, 2507), (126, 425)),
    "2K_C64": ((833, 16180), (178, 814)),
    "4K_C32": ((233, 989), (232, 578)),
    "8K_C32": ((1316, 29864), (438, 1701)),
    "8K_C64": ((2584, 57523), (541, 3441)),
}

LEARN_SECONDS = 240.0

REPRODUCED = 0.15
"""Largest relative error of a mean TTFT that was not fitted."""

LEVELS = (0.5, 0.9)
"""SLAs of the goodput table: TTFT that the better of always and never keeps for this share of the requests."""


@dataclass(frozen=True)
class Step:
    """A scenario of the steps table: when its link changes for the worse and heals, and whom that concerns."""

    name: str
    harm: tuple[float, ...] = ()
    heal: tuple[float, ...] = ()
    engines: tuple[int, ...] = ()
    bounces: int = 1  # open/bypass reversals allowed per change


STEPS = (
    Step("steady"),
    Step("rtt-step", (80.0,), (160.0,)),
    Step("bandwidth", (80.0,), (160.0,)),
    Step("stalls", tuple(range(60, 240, 40)), tuple(range(62, 240, 40))),
    Step("loss", (80.0,), (110.0,)),
    Step("flapping", tuple(range(60, 360, 60)), tuple(range(90, 360, 60))),
    Step("noise"),
    Step("sick-engine", (80.0,), (160.0,), engines=(3,)),
    Step("aborts", (80.0,), (120.0,)),
    Step("dead-worker", (80.0,), engines=(1,)),
)


def matrix_scenario(case: str, *, seed: int = 0, turns: int | None = None) -> Scenario:
    """One cell of the matrix under the one stated set of parameters (docs/simulate.md)."""
    tokens, clients = case.split("K_C")
    base = scenario.load("matrix")
    update: dict[str, Any] = {"concurrency": int(clients), "prompt_tokens": 1024 * int(tokens)}
    if turns is not None:
        update["turns"] = turns
    work = base.workload.model_copy(update=update)
    return base.model_copy(update={"workload": work, "title": case, "seed": seed})


def with_sla(made: Scenario, ttft: float) -> Scenario:
    """The scenario with another bound on TTFT."""
    return made.model_copy(update={"objective": made.objective.model_copy(update={"ttft": ttft})})


def sla(results: Sequence[Result], level: float) -> float:
    """The TTFT that the better of these keeps for `level` of the requests, seconds."""
    return min(sorted(each.ttft())[int(level * (len(each.ttft()) - 1))] for each in results)


def within(result: Result, bound: float) -> float:
    """Share of the requests with a TTFT of at most `bound`."""
    ttft = result.ttft()
    return float((ttft <= bound).mean()) if len(ttft) else 0.0


def reversals(result: Result, engine: int) -> list[float]:
    """Times at which an engine went from reading to bypass or back; half-open is still bypass."""
    reading, times = True, []
    for at, number, state, _ in result.changes:
        if number == engine and state != "half-open" and (state != "bypass") is not reading:
            reading = not reading
            times.append(at)
    return times


def resumed(result: Result, heal: float, engines: Sequence[int]) -> dict[int, float]:
    """Seconds from the healing to the first read of an engine that is no trickle; infinite when there is none."""
    found = dict.fromkeys(engines, float("inf"))
    for row in sorted(result.rows, key=lambda row: row.read_start):
        if row.engine in found and row.loaded and row.read_start >= heal and row.reason != TRICKLE:
            found[row.engine] = min(found[row.engine], row.read_start - heal)
    return found


def judge(step: Step, result: Result, engines: int) -> list[str]:
    """What a steps scenario shows that it must not; empty when all is well."""
    wrong = []
    concerned = step.engines or tuple(range(engines))
    allowed = (len(step.harm) + len(step.heal)) * step.bounces
    for engine in range(engines):
        count = len(reversals(result, engine))
        if count > (allowed if engine in concerned else 0):
            wrong.append(f"engine {engine}: {count} reversals for {allowed if engine in concerned else 0} changes")
    for heal in step.heal:
        late = {engine: after for engine, after in resumed(result, heal, concerned).items() if after > 10.0}
        if late:
            wrong.append(f"healed at {heal:g} s, reads resumed after " + _late(late))
    if result.leaked:
        wrong.append(f"{result.leaked} permits leaked")
    return wrong


def _late(late: dict[int, float]) -> str:
    return ", ".join(f"{after:.1f} s (engine {engine})" for engine, after in late.items())


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"


def matrix(*, small: bool) -> Iterator[bool]:
    """The model against the public figures, then auto against the better fixed choice, cell by cell."""
    print("\nMatrix: model against the public figures (ms); a mean within 25 %, a p99 within a factor of 2")
    print(f"  {'cell':8} {'policy':7} {'mean':>6} {'public':>7} {'ratio':>6}   {'p99':>6} {'public':>7} {'ratio':>6}")
    kept: dict[str, list[Result]] = {}
    for case, public in MATRIX.items():
        kept[case] = [simulate(matrix_scenario(case), policy) for policy in FIXED]
        for result, (mean, p99) in zip(kept[case], public, strict=True):
            s = result.summary()
            ours = 1000 * s["ttft_mean"], 1000 * (s["ttft_p99"] or float("inf"))
            ratios = ours[0] / mean, ours[1] / p99
            fine = 0.75 <= ratios[0] <= 1.25 and 0.5 <= ratios[1] <= 2.0
            print(
                f"  {case:8} {result.policy:7} {ours[0]:6.0f} {mean:7} {ratios[0]:6.2f}   {ours[1]:6.0f} {p99:7}"
                f" {ratios[1]:6.2f}  {'' if fine else 'not matched'}"
            )
            yield fine
    print(
        f"\nMatrix: auto against the better of always and never (simulated); it has seen {LEARN_SECONDS:g} s of light,"
        " mixed traffic on this set-up in observe before"
    )
    print(f"  {'cell':8} {'auto mean':>9} {'ratio':>6} (goal 1.10)  {'auto p99':>9} {'ratio':>6} (goal 1.50)")
    mixed = Conversations(rate=1.0, users=400, first_tokens=3000, turn_tokens=400, output_tokens=50, longest=9000)
    known = learn(scenario.load("matrix").model_copy(update={"workload": mixed}), LEARN_SECONDS)
    for case in list(MATRIX)[:2] if small else MATRIX:
        s = simulate(matrix_scenario(case), "auto", known).summary()
        fixed = [each.summary() for each in kept[case]]
        mean = s["ttft_mean"] / min(each["ttft_mean"] for each in fixed)
        p99 = (s["ttft_p99"] or float("inf")) / min(each["ttft_p99"] or float("inf") for each in fixed)
        fine = mean <= 1.10 and p99 <= 1.5
        print(
            f"  {case:8} {_ms(s['ttft_mean']):>9} {mean:6.2f}              {_ms(s['ttft_p99']):>9} {p99:6.2f}"
            f"              {'' if fine else 'missed'}"
        )
        yield fine


def steps(*, small: bool) -> Iterator[bool]:
    """Reversals, healing and permits."""
    print(
        "\nSteps (simulated): at most one reversal per real change, reads back within 10 s of healing, no permit leaks"
    )
    for step in STEPS:
        if small and step.name not in ("rtt-step", "loss"):
            continue
        made = scenario.load(step.name)
        result = simulate(made, "auto")
        wrong = judge(step, result, made.engine.count)
        counts = [len(reversals(result, engine)) for engine in range(made.engine.count)]
        back = [max(resumed(result, heal, step.engines or range(made.engine.count)).values()) for heal in step.heal]
        said = ", ".join(f"{each:.1f}" for each in back)
        states = ", ".join(f"{name} {share:.0%}" for name, share in result.states.items())
        print(f"  {step.name:12} reversals {counts}  reads back after [{said}] s  {states}")
        for each in wrong:
            print(f"               MISSED: {each}")
        yield not wrong


def goodput(names: Sequence[str], scenarios: Sequence[Scenario], levels: Sequence[float]) -> Iterator[bool]:
    """Auto against the fixed choices and the rivals at SLAs that the better fixed choice keeps for part of requests."""
    print("\nGoodput, share of requests within the SLA (simulated); goal: auto >= 0.97 of the better fixed choice")
    policies = (*FIXED, *RIVALS, "clairvoyant")
    print(f"  {'scenario':14} {'SLA ms':>7} " + " ".join(f"{name[:9]:>9}" for name in (*policies, "auto")) + "   ratio")
    totals = dict.fromkeys((*policies, "auto"), 0.0)
    rows = 0
    for name, made in zip(names, scenarios, strict=True):
        results = {policy: simulate(made, policy) for policy in policies}
        for level in levels:
            bound = sla([results[policy] for policy in FIXED], level)
            shares = {policy: within(result, bound) for policy, result in results.items()}
            shares["auto"] = within(simulate(with_sla(made, bound), "auto"), bound)
            for policy, share in shares.items():
                totals[policy] += share
            rows += 1
            ratio = shares["auto"] / max(shares[policy] for policy in FIXED)
            print(
                f"  {name:14} {_ms(bound):>7} " + " ".join(f"{shares[each]:9.3f}" for each in totals)
                + f"  {ratio:6.3f}{'' if ratio >= 0.97 else '  missed'}", flush=True,
            )  # fmt: skip
            yield ratio >= 0.97
    print(f"  {'mean':22} " + " ".join(f"{total / rows:9.3f}" for total in totals.values()))
    for rival in RIVALS:
        fine = totals["auto"] >= totals[rival]
        print(f"  auto at least as good as {rival} on average: {'yes' if fine else 'MISSED'}")
        yield fine


def mooncake(path: Path, rtt: float) -> Scenario:
    """Mooncake's conversation trace on four engines; the whole hour."""
    return scenario.parse(
        {
            "title": f"Mooncake conversation trace, RTT {1000 * rtt:g} ms", "seconds": 3600,
            "engine": {"count": 6}, "connector": {"chunk_tokens": 512, "lookup_trips": 0.1, "readers": 8},
            "link": {"rtt": rtt, "gbit": 50.0}, "workload": {"kind": "trace", "path": path},
        }
    )  # fmt: skip


def lab(path: Path) -> Iterator[bool]:
    """The simulator fitted to one part of a measured sweep, point by point against all of it."""
    part, rest = fit.split(fit.read(path))
    made = fit.fit(part)
    engine, connector = made.engine, made.connector
    print(
        f"\nSweep {path}: fitted to {len(part)} of {len(part) + len(rest)} points; the others within {REPRODUCED:.0%}\n"
        f"  prefill {_ms(engine.step_seconds)} ms + {1e6 * engine.token_seconds:.1f} us a token, intake"
        f" {_ms(engine.intake_seconds)} ms, read {_ms(connector.lookup_seconds)} ms + {connector.lookup_trips:.2f} RTT"
        f" a chunk of {connector.chunk_tokens} tokens, {connector.readers} at a time"
    )
    print(f"  {'':8} {'RTT ms':>7} {'at once':>7} {'road':9} {'n':>4} {'measured':>9} {'simulated':>9}   error")
    for name, points in (("fitted", part), ("held out", rest)):
        for each in fit.reproduce(made, points):
            point, error = each.point, each.ratio - 1.0
            fine = abs(error) <= REPRODUCED
            print(
                f"  {name:8} {1e3 * point.rtt:7.2f} {point.concurrency:7} {point.road:9} {point.n:4}"
                f" {_ms(point.ttft):>9} {_ms(each.simulated):>9}  {error:+6.1%}"
                f"{'' if fine else '  missed' if points is rest else '  far'}"
            )
            if points is rest:
                yield fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks policies")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=("matrix", "steps", "goodput", "mooncake", "lab"))
    parser.add_argument("--sweep", type=Path, help="directory of `kvguard sweep`, or its cells.jsonl")
    options = parser.parse_args(["--small"] if arguments is None else arguments)
    small, only = options.small, options.only
    if only == "lab" and options.sweep is None:
        parser.error("--only lab needs --sweep")
    fine: list[bool] = []
    if only in (None, "matrix"):
        fine += matrix(small=small)
    if only in (None, "steps"):
        fine += steps(small=small)
    if only in (None, "goodput"):
        names = ["rtt-step", "stalls"] if small else [step.name for step in STEPS if step.name != "noise"]
        fine += goodput(names, [scenario.load(name) for name in names], LEVELS[:1] if small else LEVELS)
    trace = Path(os.environ.get("KVGUARD_TRACES", "")) / "mooncake_conversation_trace.jsonl"
    if only in (None, "mooncake") and not small:
        if trace.is_file():
            rtts = (0.0002, 0.005, 0.05)
            fine += goodput(
                [f"mooncake {1000 * rtt:g}ms" for rtt in rtts], [mooncake(trace, rtt) for rtt in rtts], (0.7,)
            )
        else:
            print("\nMooncake's conversation trace: left out, KVGUARD_TRACES does not name a directory that has it")
    if only == "lab":
        fine += lab(options.sweep)
    print(f"\n{sum(fine)} of {len(fine)} goals met")
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
