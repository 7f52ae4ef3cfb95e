"""Reads against what the models say of them: how slow, which tell, which are one observation.

`noise` is of log(actual / projected).
"""

import math
import statistics
from collections.abc import Sequence

from guard.control.projection import rtt_of
from guard.control.shapes import ALL, Evidence, Read
from guard.costs import Costs


def slowdown(reads: Sequence[Read], evidence: Evidence, costs: Costs, noise: float) -> float:
    """Median of actual over projected of the last reads; few count less, and what may be noise is 1."""
    logs = [_slow(read, usual) for read in reads if (usual := expected(read, evidence, costs)) > 0.0]
    if not logs:
        return 1.0
    middle = statistics.median(logs) if len(logs) > 2 else 0.0
    if len(logs) > 1 and min(logs[-2:]) > max(middle, noise):
        middle = min(logs[-2:])  # two slow ones that follow one another are no outliers
    elif len(logs) == 1:
        middle = logs[0] / 2.0
    usual = max(noise, math.log(costs.fetch_tail) / len(logs) ** 0.5)
    return 1.0 if abs(middle) <= usual else math.exp(min(max(middle, -3.0), 7.0))


def tells(read: Read, evidence: Evidence, costs: Costs, noise: float) -> bool:
    """Whether a read was in time, or slow, for sure: not where either may be, by how long it waited for the engine."""
    usual = expected(read, evidence, costs)
    return read.least > usual or read.seconds <= usual * max(costs.fetch_tail, math.exp(noise))


def _slow(read: Read, usual: float) -> float:
    """Log of actual over usual; 0 where a read took either, depending on when in a step of the engine it ended."""
    if read.seconds <= usual or read.least <= 0.0:
        return min(math.log(read.seconds / usual), 0.0)
    return max(math.log(read.least / usual), 0.0)


def apart(reads: Sequence[Read], most: int) -> list[Read]:
    """The latest reads, none of which began before the one before it had ended: a burst is one observation."""
    found: list[Read] = []
    for read in reversed(reads):
        if not found or read.at <= found[-1].at - found[-1].seconds:
            found.append(read)
            if len(found) == most:
                break
    return found[::-1]


def expected(read: Read, evidence: Evidence, costs: Costs) -> float:
    """What the models say of a read, at the RTT of its time: an old one must not look fast because RTT rose since."""
    cell = evidence.cells[ALL]
    kappa = sum(
        model.kappa + model.kappa_per_byte * read.bytes for model in (cell.fetch, cell.lookup) if model is not None
    )
    now = rtt_of(evidence, cell)
    shift = kappa * (read.rtt - now) if read.rtt is not None else 0.0
    return costs.read_seconds(read.bytes, max(read.inflight - 1, 0) * read.bytes) + shift
