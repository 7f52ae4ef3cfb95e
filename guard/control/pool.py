"""Engines that read one backend share its link: one budget of reads in flight, split fairly. Pure.

What slows every engine is the link and shrinks the budget; what slows one engine is that engine's own (its state is
its own, too). So the pool goes by the median over engines, and acts only where several of them read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from guard.control.limit import baseline_after, fair_split, limit_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory of one backend's pool: the budget (None: none needed) and its baseline."""

    limit: float | None = None
    baseline: float | None = None


def shared(pool: Pool, times: Mapping[str, float], inflight: Mapping[str, int]) -> tuple[Pool, dict[str, int]]:
    """The pool after one step, and each engine's part of the budget (empty: no budget).

    Args:
        pool: what was before.
        times: by engine, mean time of the reads that ended, over what is projected for their size on an idle link.
        inflight: by engine, reads in flight now.
    """
    total = sum(inflight.values())
    if len(times) >= 2:
        actual = median(times.values())
        baseline = baseline_after(pool.baseline, actual, total)
        pool = Pool(limit=limit_after(pool.limit, baseline, actual, total), baseline=baseline)
    if pool.limit is None or len(inflight) < 2:
        return pool, {}
    return pool, fair_split(max(int(pool.limit), len(inflight)), dict(inflight))
