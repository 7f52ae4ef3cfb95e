"""The grid does not drift, targets do not hold each other up, cost is bounded."""

import itertools
import random
import threading
import time
from collections import Counter

import pytest

from guard.probe.prober import Sample, Target
from guard.probe.schedule import JITTER, Budget, Schedule, Slots


def test_the_grid_keeps_its_phase_for_a_day():
    slots = Slots(100.0, 1.0, random.Random(1))
    now, dues = 100.0, []
    for _ in range(86_400):
        due = slots.after(now)
        dues.append(due)
        now = due + 0.3  # what the round takes
    assert dues == sorted(dues)
    assert 86_399 - JITTER <= dues[-1] - dues[0] <= 86_399 + JITTER


def test_a_round_that_takes_long_leaves_slots_out_and_does_not_catch_up():
    slots = Slots(0.0, 1.0, random.Random(2))
    first = slots.after(0.0)
    later = slots.after(first + 10.4)
    assert first + 10.4 < later <= first + 11.4 + JITTER
    assert slots.after(later) - later >= 1.0 - JITTER


def test_phases_of_a_hundred_targets_spread_over_the_interval():
    rng = random.Random(3)
    phases = sorted(Slots(0.0, 1.0, rng).after(0.0) for _ in range(100))
    assert max(b - a for a, b in itertools.pairwise(phases)) < 0.15


def test_the_budget_bounds_the_share_of_a_core_whatever_a_round_costs():
    budget = Budget(0.001)
    assert budget.rest(0.2) == 0.0  # the first one sets the connection up
    assert budget.rest(0.0005) == 0.5
    assert budget.rest(0.2) == 0.5  # as does one after a failure
    for _ in range(4):
        rest = budget.rest(0.004)
    assert rest == 4.0


class Counting:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.closed = 0

    def probe(self, count: int, timeout: float) -> Sample:
        if self.seconds:
            time.sleep(self.seconds)
        return Sample(rtts=(1e-3,) * count, sent=count)

    def close(self) -> None:
        self.closed += 1


class Broken(Counting):
    def probe(self, count: int, timeout: float) -> Sample:
        raise RuntimeError("boom")


@pytest.mark.quiet
def test_a_hundred_targets_are_probed_evenly_beside_one_that_hangs_and_one_that_breaks():
    told: list[tuple[str, float, Sample]] = []
    enough = threading.Event()

    def tell(target: Target, at: float, sample: Sample) -> None:
        told.append((target.target, at, sample))
        if len(told) >= 1000:
            enough.set()

    probers = [(Target(target=str(index), prober="fake", interval=0.5), Counting()) for index in range(100)]
    hanging, broken = Counting(seconds=5.0), Broken()
    probers.append((Target(target="hangs", prober="fake", interval=0.5), hanging))
    probers.append((Target(target="broken", prober="fake", interval=0.5), broken))
    schedule = Schedule(probers, tell, cpu_share=1.0, seed=1)
    schedule.start()
    assert enough.wait(60)
    schedule.stop()
    rounds = Counter(name for name, _, _ in told)
    healthy = [rounds[str(index)] for index in range(100)]
    assert max(healthy) - min(healthy) <= 2
    assert rounds["broken"] >= 5
    assert all("boom" in sample.problem for name, _, sample in told if name == "broken")
    assert rounds["hangs"] <= 2
    assert [prober.closed for _, prober in probers[:100]] == [1] * 100
    # No drift: a target's rounds lie on its own grid, so their distance is a multiple of the interval, jitter aside.
    at: dict[str, list[float]] = {}
    for name, wall, _ in told:
        at.setdefault(name, []).append(wall)
    offsets = [(b - times[0] + 0.15) % 0.5 for name, times in at.items() if name.isdigit() for b in times[1:]]
    assert sorted(offsets)[len(offsets) // 2] < 0.3
