"""Shifts of the idle RTT are told soon, noise is not."""

import math
import random

import pytest

from guard.probe.crossing import LEARN, Detector, Shift
from tests.probe.simulated import run


def feed(detector: Detector, rtts: list[float], at: float = 0.0) -> list[tuple[int, Shift]]:
    found = [(index, detector.add(at + index, rtt)) for index, rtt in enumerate(rtts)]
    return [(index, shift) for index, shift in found if shift is not None]


def quiet(level: float, rounds: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, 0.05)) for _ in range(rounds)]


@pytest.mark.parametrize("factor", [1.5, 3.0, 100.0, 1 / 1.5, 1 / 3.0, 0.01])
def test_a_step_is_told_at_the_fourth_round_with_both_levels(factor):
    detector = Detector()
    assert feed(detector, quiet(1e-3, 300)) == []
    [(index, shift)] = feed(detector, quiet(1e-3 * factor, 300, seed=2), at=300)
    assert index <= 3
    assert shift.before == pytest.approx(1e-3, rel=0.03)
    assert shift.after == pytest.approx(1e-3 * factor, rel=0.1)
    assert shift.since == 300.0
    assert detector.level == pytest.approx(1e-3 * factor, rel=0.03)


def test_a_step_back_is_told_too():
    detector = Detector()
    found = feed(detector, [*quiet(1e-4, 60), *quiet(3e-4, 60, 2), *quiet(1e-4, 60, 3)])
    assert [60 <= index < 64 or 120 <= index < 124 for index, _ in found] == [True, True]


def test_three_outliers_in_a_row_are_not_a_shift():
    detector = Detector()
    rtts = quiet(1e-3, 400)
    for start in range(50, 400, 50):
        rtts[start : start + 3] = [1.0, 1.0, 1.0]
    assert feed(detector, rtts) == []


def test_a_slow_drift_and_a_small_step_are_followed_in_silence():
    detector = Detector()
    assert feed(detector, [1e-3 * (1 + index / 20_000) for index in range(20_000)]) == []
    assert detector.level == pytest.approx(2e-3, rel=0.05)
    assert feed(detector, quiet(2e-3 * 1.1, 2000)) == []
    assert detector.level == pytest.approx(2.2e-3, rel=0.03)


def test_microseconds_of_a_fast_link_are_noise():
    rng = random.Random(3)
    assert feed(Detector(), [3e-6 + 2e-6 * rng.random() for _ in range(5000)]) == []


def test_it_learns_first():
    detector = Detector()
    assert detector.level is None
    feed(detector, quiet(1e-3, LEARN - 1))
    assert detector.level is None
    feed(detector, [1e-3])
    assert detector.level == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("kind", ["t3", "queue"])
def test_simulated_hours_with_plateaus_bring_every_step_and_nothing_else(kind):
    """The full run is `make probe-crossings`: 400 h per kind and seed, docs/results."""
    outcome = run(kind, hours=12, seed=11)
    assert outcome.steps >= 8
    assert (outcome.missed, outcome.false) == (0, 0)
    assert max(outcome.rounds) <= 4
