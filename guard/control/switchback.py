"""A switchback experiment: remote reads on and off in turn, and what that says. Pure.

Blocks come in pairs, on and off, in random order within each pair: what drifts more slowly than a pair hits both arms
alike. Requests count by what was asked for when they arrived, whatever road they took. The effect is the mean over
pairs of log(mean TTFT on / mean TTFT off), with Student's t interval over pairs: blocks, not requests, are independent.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ON: Final = "on"
OFF: Final = "off"
LEAST_PAIRS: Final = 3
LEAST_REQUESTS: Final = 10

_T95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 97.5 %, for 1 to 30 degrees of freedom (any table); beyond, the last one, which is on the safe side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one block measured: mean TTFT in seconds over `n` requests that arrived after the washout."""

    pair: int
    arm: str
    n: int
    ttft: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """`ratio` is mean TTFT with remote reads over that without: below 1 they help. None: `reason` says why."""

    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    requests: int
    reason: str = ""

    @property
    def verdict(self) -> str:
        """helps, hurts, or no difference that could be told."""
        if self.low is None or self.high is None:
            return "insufficient data"
        return "helps" if self.high < 1.0 else "hurts" if self.low > 1.0 else "no difference that could be told"


def order(pairs: int, rng: random.Random) -> list[tuple[int, str]]:
    """The blocks in the order in which they are run: (pair, arm)."""
    found: list[tuple[int, str]] = []
    for pair in range(pairs):
        arms = [ON, OFF]
        rng.shuffle(arms)
        found += [(pair, arm) for arm in arms]
    return found


def effect(blocks: Sequence[Block]) -> Effect:
    """What the blocks say; a pair with a block of too few requests is left out."""
    by_pair: dict[int, dict[str, Block]] = {}
    for block in blocks:
        by_pair.setdefault(block.pair, {})[block.arm] = block
    logs, requests = [], 0
    for arms in by_pair.values():
        on, off = arms.get(ON), arms.get(OFF)
        if on is None or off is None or not on.ttft or not off.ttft or min(on.n, off.n) < LEAST_REQUESTS:
            continue
        logs.append(math.log(on.ttft / off.ttft))
        requests += on.n + off.n
    n = len(logs)
    if n < LEAST_PAIRS:
        why = f"{n} of at least {LEAST_PAIRS} pairs have {LEAST_REQUESTS} requests in both blocks"
        return Effect(ratio=None, low=None, high=None, pairs=n, requests=requests, reason=why)
    mean = sum(logs) / n
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / (n - 1))
    half = _T95[min(n - 1, len(_T95)) - 1] * spread / math.sqrt(n)
    return Effect(
        ratio=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), pairs=n, requests=requests
    )
