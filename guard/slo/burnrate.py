"""Error budget, burn rate and goodput from counts of requests that met and missed their objective. Pure.

Burn rate after the SRE workbook (https://sre.google/workbook/alerting-on-slos/): the share that missed over the share
that may miss. At 1 the budget is used up exactly at the end of its period; at 14.4 in two days of thirty.
"""

from collections import deque
from dataclasses import dataclass

from guard.slo.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How an objective stood over `seconds`: None where no request came."""

    met: int
    missed: int
    seconds: float
    attained: float | None  # share that met it
    burn_rate: float | None
    budget_left: float | None  # share of the budget of that time that is left; below 0: overdrawn
    goodput: float  # requests per second that met it


def standing(objective: Objective, met: int, missed: int, seconds: float) -> Standing:
    """The standing of `objective` from counts over `seconds`."""
    total = met + missed
    burn = missed / total / objective.budget if total else None
    return Standing(
        met=met,
        missed=missed,
        seconds=seconds,
        attained=met / total if total else None,
        burn_rate=burn,
        budget_left=None if burn is None else 1.0 - burn,
        goodput=met / seconds if seconds > 0.0 else 0.0,
    )


class Tally:
    """Counts of met and missed over the last `seconds`, in slices, so that memory does not grow with traffic."""

    def __init__(self, seconds: float = 300.0, slices: int = 60) -> None:
        self.seconds = seconds
        self._width = seconds / slices
        self._slices: deque[tuple[int, int, int]] = deque(maxlen=slices)  # number of the slice, met, missed

    def add(self, now: float, *, met: bool) -> None:
        """Counts one request at `now`, seconds; times that run backwards count for the latest slice."""
        number = int(now / self._width)
        if not self._slices or number > self._slices[-1][0]:
            self._slices.append((number, 0, 0))
        last, good, bad = self._slices[-1]
        self._slices[-1] = (last, good + met, bad + (not met))

    def counts(self, now: float) -> tuple[int, int]:
        """Met and missed over the last `seconds`."""
        first = int(now / self._width) - int(self.seconds / self._width)
        held = [item for item in self._slices if item[0] > first]
        return sum(item[1] for item in held), sum(item[2] for item in held)
