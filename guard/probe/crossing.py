"""Tells when the idle RTT of a target has shifted: two-sided CUSUM on log RTT with a noise floor. Pure.

    y = log(rtt + FLOOR)          z = clip((y - level) / sigma, -CLIP, CLIP)
    up = max(0, up + z - SLACK)   down = max(0, down - z - SLACK)      shift where one of them exceeds THRESHOLD

`level` is the mean of the plateau so far, `sigma` its robust spread but never below NOISE. With CLIP - SLACK = 5 and
THRESHOLD = 18, no fewer than four rounds together can raise an event: outliers, however far, cannot. A step of
exp(CLIP * NOISE) - 1 = 35 % or more is seen at the fourth round after it: 4 s at an interval of 1 s.
Page (1954), "Continuous inspection schemes"; the constants stand on simulation (docs/results, `make probe-crossings`).
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

NOISE: Final = 0.05
FLOOR: Final = 10e-6
CLIP: Final = 6.0
HURRY: Final = 32
"""Rounds over which the level is averaged while a shift that is too small to tell goes on."""

FAR: Final = 3.0
"""A round farther from the level, in sigma, is an outlier or a shift: neither moves the level."""

SLACK: Final = 1.0
THRESHOLD: Final = 18.0
SMALLEST: Final = math.log(1.25)
"""A shift of less, in log RTT, is followed and not told: it is in the range of ordinary wander."""

LATEST: Final = 3
"""Least number of rounds whose median is the new level: half of those of the shift, which are four or more."""

LEARN: Final = 8
"""Rounds of a new plateau before shifts are looked for."""

MEMORY: Final = 512
"""Rounds over which level and spread are averaged: slow wander is followed, steps are told."""


@dataclass(frozen=True, slots=True)
class Shift:
    """The idle RTT went from `before` to `after`, seconds; `since` is the time of the first round at the new level."""

    before: float
    after: float
    since: float
    rounds: int


class Detector:
    """Follows one target. `level` is its idle RTT in seconds, None until the first rounds are in."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._level = 0.0
        self._spread = NOISE
        self._n = 0
        self._up = 0.0
        self._down = 0.0
        self._rising: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        self._falling: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    @property
    def level(self) -> float | None:
        """The idle RTT that holds now, seconds."""
        return math.exp(self._level) - FLOOR if self._n else None

    def add(self, at: float, rtt: float) -> Shift | None:
        """Takes the least RTT of a round at time `at`; returns the shift that it completes."""
        y = math.log(max(rtt, 0.0) + FLOOR)
        if not self._n:
            self._first.append(y)
            if len(self._first) == LEARN:
                self._settle(self._first)
            return None
        z = max(-CLIP, min(CLIP, (y - self._level) / max(self._spread, NOISE)))
        self._up = _summed(self._up + z - SLACK, self._rising, (at, y))
        self._down = _summed(self._down - z - SLACK, self._falling, (at, y))
        if max(self._up, self._down) > THRESHOLD:
            shift = self._shifted(self._rising if self._up > THRESHOLD else self._falling)
            if shift is not None:
                return shift
            self._up, self._down = min(self._up, THRESHOLD / 2), min(self._down, THRESHOLD / 2)
            self._n = min(self._n, HURRY)  # too small to tell: the level goes there on its own
        if abs(z) < FAR:
            error = y - self._level
            self._n = min(self._n + 1, MEMORY)
            self._level += error / self._n
            # 1.2533 times the mean absolute error is the standard deviation of a normal.
            self._spread += (1.2533 * abs(error) - self._spread) / max(self._n, 64)
        return None

    def _shifted(self, run: deque[tuple[float, float]]) -> Shift | None:
        """Takes the level of the last rounds: the run may have begun with outliers before the shift."""
        before, rounds = self._level, list(run)
        latest = [y for _, y in rounds[-max(LATEST, min(len(rounds) // 2, HURRY)) :]]
        if abs(median(latest) - before) < SMALLEST:
            return None
        self._settle(latest)
        new = len(rounds) - 1
        while new > 0 and abs(rounds[new - 1][1] - self._level) < abs(rounds[new - 1][1] - before):
            new -= 1
        return Shift(math.exp(before) - FLOOR, math.exp(self._level) - FLOOR, rounds[new][0], len(rounds) - new)

    def _settle(self, values: list[float]) -> None:
        self._level, self._n = median(values), len(values)
        self._first = []
        self._up = self._down = 0.0
        self._rising.clear()
        self._falling.clear()


def _summed(total: float, run: deque[tuple[float, float]], one: tuple[float, float]) -> float:
    """The sum of one side, not below 0; `run` keeps the rounds since it last was 0."""
    if total <= 0.0:
        run.clear()
        return 0.0
    run.append(one)
    return total
