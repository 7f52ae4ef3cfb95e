"""A limit on reads in flight that follows their time, after Gradient2 of Netflix's concurrency-limits. Pure.

    gradient  = clamp(TOLERANCE * baseline / actual, 0.5, 1)
    limit'    = limit * gradient + sqrt(limit), smoothed, between 1 and LARGEST

`actual` is the time of a read over what is projected for its size on an idle link; `baseline` is the least of it seen
with few reads in flight, drifting up slowly so that a link that has changed is measured anew.

- Nothing queues: the gradient is 1 and the limit grows by its root until it is not in force any more (None), whether
  it is used or not: those it refuses are not seen in flight, and a limit that only falls would stay for ever.
- Reads queue: the limit falls until reads take TOLERANCE times the baseline.
- Reads are slow and few (less than half of the limit in flight): the limit stays; their number is not why.
"""

from typing import Final

TOLERANCE: Final = 2.0
LARGEST: Final = 256.0
SMOOTHING: Final = 0.3
DRIFT: Final = 1.01


def baseline_after(baseline: float | None, actual: float, inflight: int) -> float:
    """The baseline after one read."""
    if baseline is None or actual < baseline:
        return actual
    return min(baseline * DRIFT, actual) if inflight <= 2 else baseline


def limit_after(limit: float | None, baseline: float, actual: float, inflight: int) -> float | None:
    """The limit after reads that took `actual` with `inflight` in flight; None: no limit."""
    if limit is None:
        if actual <= TOLERANCE * baseline or inflight < 4:
            return None
        limit = float(inflight)
    elif inflight < limit / 2.0 and actual > TOLERANCE * baseline:
        return limit
    gradient = min(max(TOLERANCE * baseline / actual, 0.5), 1.0)
    wanted = limit * gradient + limit**0.5 * (gradient >= 1.0)
    after = max(1.0, limit + SMOOTHING * (wanted - limit))
    return None if after >= LARGEST else after


def fair_split(budget: int, demands: dict[str, int]) -> dict[str, int]:
    """Splits a budget by max-min fairness: small demands in full, the rest in equal parts; at least 1 each.

    What is left over when all demands are met goes to everybody in equal parts, so that each may grow.
    """
    shares: dict[str, int] = {}
    left = budget
    waiting = sorted(demands, key=lambda name: (demands[name], name))
    for index, name in enumerate(waiting):
        part = left // (len(waiting) - index)
        shares[name] = max(1, min(demands[name], part))
        left = max(0, left - shares[name])
    extra = left // len(waiting) if waiting else 0
    return {name: share + extra for name, share in shares.items()}
