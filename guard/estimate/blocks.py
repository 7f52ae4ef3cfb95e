"""Cuts samples into blocks: stretches of time of one engine during which RTT stands still.

Noise of requests is autocorrelated, that of block means hardly; so every standard error here counts blocks. A block
ends where the engine changes, where RTT steps by more than `STEP`, and when it is long enough.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from guard.estimate.samples import Array

MOST: Final = 96
"""Blocks aimed at where rows are many: RTT that drifts hardly moves within one, or a knee is blunted."""

FEWEST: Final = 48
"""Blocks aimed at where rows are few: enough for a variance."""

ROWS: Final = 16
"""Rows of a block in between: it outlasts the noise's memory, and its mean RTT has little error of single probes."""

STEP: Final = 0.3
"""A step of log RTT that begins a new block; three probes' mean of 10 % error moves by less (3.7 sd)."""

_SIDE: Final = 3

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Blocks:
    """`of` is the block of each row, rows of a block adjacent; `chain` numbers the blocks that follow one another."""

    of: Ints
    count: int
    chain: Ints

    def sums(self, values: Array) -> Array:
        """Sum of `values` per block."""
        result: Array = np.bincount(self.of, values, self.count)
        return result


def cut(engine: Array, rtt: Array) -> Blocks:
    """Blocks of rows that are sorted by engine and then by time. `rtt` may have NaN: those go with their neighbours."""
    n = engine.size
    starts = np.zeros(n, dtype=bool)
    if n == 0:
        return Blocks(np.zeros(0, np.intp), 0, np.zeros(0, np.intp))
    starts[0] = True
    new_engine = np.flatnonzero(engine[1:] != engine[:-1]) + 1
    starts[new_engine] = True
    starts[_steps(rtt)] = True
    first = np.flatnonzero(starts)
    size = max(1, n // MOST, min(n // FEWEST, ROWS))
    pieces = np.maximum(np.diff(first, append=n) // size, 1)  # of a stretch; the last takes the remainder
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    heads = np.repeat(first, pieces) + size * number
    of = np.repeat(np.arange(heads.size), np.diff(heads, append=n))
    chain = np.cumsum(np.append(False, engine[heads[1:]] != engine[heads[:-1]]))
    return Blocks(of, heads.size, chain.astype(np.intp))


def _steps(rtt: Array) -> Ints:
    """Rows at which the mean of the next three log RTTs differs from that of the last three by more than `STEP`."""
    known = np.flatnonzero(rtt == rtt)  # not NaN
    if known.size < 2 * _SIDE:
        return known[:0]
    total = np.zeros(known.size + 1)
    np.cumsum(np.log(rtt.take(known)), out=total[1:])
    mean = (total[_SIDE:] - total[:-_SIDE]) / _SIDE
    jump = np.abs(mean[_SIDE:] - mean[:-_SIDE])
    padded = np.zeros(jump.size + 4)
    padded[2:-2] = jump
    highest = jump > STEP
    for shift in (0, 1, 3, 4):
        other = padded[shift : shift + jump.size]
        highest &= jump >= other if shift < 2 else jump > other
    return known[np.flatnonzero(highest) + _SIDE]
