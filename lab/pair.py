"""Two stacks side by side, one with kvguard's hook and one without, and comparisons between them in paired blocks.

Both run at once, so that a block on the one is followed at once by the same block on the other and a slow stretch of
the machine hits both. What is idle costs next to nothing. Needs about 10 GB of memory.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from lab.config import StackConfig
from lab.env import LabEnv
from lab.stack import Stack

RESAMPLES = 4000
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """The two stacks."""

    hooked: Stack
    plain: Stack

    def __iter__(self) -> Iterator[Stack]:
        return iter((self.hooked, self.plain))

    def both(self, action: Callable[[Stack], T]) -> tuple[T, T]:
        """Does the same with both at once; hooked first in the answer."""
        with ThreadPoolExecutor(2) as pool:
            hooked, plain = pool.map(action, self)
        return hooked, plain

    def in_turn(self, action: Callable[[Stack], T], block: int) -> tuple[T, T]:
        """Does the same with one after the other, which of them first changing as ABBA; hooked first in the answer."""
        order = (self.hooked, self.plain) if block % 4 in (0, 3) else (self.plain, self.hooked)
        found = {stack is self.hooked: action(stack) for stack in order}
        return found[True], found[False]


@contextmanager
def pair(config: StackConfig, env: LabEnv, say: Callable[[str], None] = lambda _: None) -> Iterator[Pair]:
    """A pair of running stacks of one configuration; the one without hook has no service either.

    The wire of the injector exists once in the lab's namespace, so these run without it: Redis is on loopback.
    """
    hooked = replace(config, injector="none", hook=True)
    plain = replace(hooked, hook=False, service=False, otlp=None)
    with ExitStack() as stop:
        stacks = [Stack(one, env, say=say) for one in (hooked, plain)]
        with ThreadPoolExecutor(2) as pool:
            starts = [pool.submit(stack.__enter__) for stack in stacks]
        for start in starts:
            if start.exception() is None:
                stop.push(start.result())
        for start in starts:
            start.result()  # raises what a start raised, after the other stack was given its end
        yield Pair(*stacks)


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and its 95 % interval by bootstrap over the values (percentiles), which are one per paired block."""
    rng = random.Random(seed)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return fmean(values), means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def ratio(tops: Sequence[float], bottoms: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Geometric mean of the blocks' ratios and its 95 % interval."""
    logs = [math.log(top / bottom) for top, bottom in zip(tops, bottoms, strict=True)]
    mean, low, high = interval(logs, seed)
    return math.exp(mean), math.exp(low), math.exp(high)
