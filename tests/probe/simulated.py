"""Simulated hours of RTT with plateaus under heavy-tailed 5 % noise: what does the crossing detector make of them?

    python -m tests.probe.simulated --hours 400 --seeds 1 2 3

Every second one round of four probes; the detector gets the least of them, as the service does. Plateaus last 10 min to
2 h (uniform) at 50 us to 20 ms (log-uniform), neighbours at least 50 % apart. Kinds of noise on log RTT:

    t3       independent, Student's t with 3 degrees of freedom, standard deviation 5 %
    t3-wide  the same with scale 5 %, standard deviation 8.7 %: beyond what the detector is made for
    queue    only ever slower: Pareto (a = 2) with scale 5 %
    wander   autocorrelated (0.9 per second) t3 with standard deviation 5 %: beyond it too
"""

import argparse
import math
import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from guard.probe.crossing import Detector

KINDS = ("t3", "t3-wide", "queue", "wander")
PROBES = 4
LATE = 60


@dataclass
class Outcome:
    kind: str
    hours: float
    seed: int
    steps: int = 0
    missed: int = 0
    false: int = 0
    rounds: Counter[int] = field(default_factory=Counter)  # from the step to its event, the first round being 1

    def row(self) -> str:
        slowest = max(self.rounds, default=0)
        within = sum(n for rounds, n in self.rounds.items() if rounds <= 4)
        return (
            f"{self.kind:<9}{self.hours:>7g}{self.seed:>6}{self.steps:>7}{self.missed:>8}"
            f"{within / max(self.steps, 1):>11.1%}{slowest:>9}{self.false:>8}{200 * self.false / self.hours:>12.2f}"
        )


HEADER = "noise      hours  seed  steps  missed  <=4 rounds  slowest   false  per 200 h"


def noise(kind: str, rng: np.random.Generator, rounds: int) -> np.ndarray:
    """The least of each round's probes, relative to the plateau, in log."""
    shape = (rounds, PROBES)
    if kind == "t3":
        return (0.05 / math.sqrt(3) * rng.standard_t(3, shape)).min(axis=1)
    if kind == "t3-wide":
        return (0.05 * rng.standard_t(3, shape)).min(axis=1)
    if kind == "queue":
        return np.log1p(0.05 * rng.pareto(2, shape)).min(axis=1)
    keep, slow = 0.9, np.empty(rounds)
    steps, level = math.sqrt(1 - keep * keep) * 0.05 / math.sqrt(3) * rng.standard_t(3, rounds), 0.0
    for index, step in enumerate(steps.tolist()):
        slow[index] = level = keep * level + step
    return slow + (0.01 * rng.standard_t(3, shape)).min(axis=1)


def plateaus(rng: np.random.Generator, rounds: int) -> tuple[list[int], np.ndarray]:
    """Where plateaus begin, and the RTT of every round."""
    starts, levels = [0], [math.exp(rng.uniform(math.log(50e-6), math.log(20e-3)))]
    while (at := starts[-1] + int(rng.uniform(600, 7200))) < rounds - LATE:
        level = math.exp(rng.uniform(math.log(50e-6), math.log(20e-3)))
        if abs(math.log(level / levels[-1])) >= math.log(1.5):
            starts.append(at)
            levels.append(level)
    return starts, np.repeat(levels, np.diff([*starts, rounds]))


def run(kind: str, hours: float, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    rounds = int(hours * 3600)
    starts, base = plateaus(rng, rounds)
    rtts = (base * np.exp(noise(kind, rng, rounds))).tolist()
    detector = Detector()
    events = [index for index, rtt in enumerate(rtts) if detector.add(float(index), rtt) is not None]
    outcome = Outcome(kind, hours, seed, steps=len(starts) - 1)
    for start in starts[1:]:
        found = next((event for event in events if start <= event < start + LATE), None)
        if found is None:
            outcome.missed += 1
        else:
            events.remove(found)
            outcome.rounds[found - start + 1] += 1
    outcome.false = len(events)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    sys.stdout.write(HEADER + "\n")
    for kind in KINDS:
        for seed in options.seeds:
            sys.stdout.write(run(kind, options.hours, seed).row() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
