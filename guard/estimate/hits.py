"""Rows of a cell in order, and its hits brought to one reference request."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from guard.estimate.blocks import Blocks, Ints, cut
from guard.estimate.linear import middle
from guard.estimate.remote import Cost, fit_cost
from guard.estimate.samples import Array, Samples

Mask = npt.NDArray[np.bool_]

RTT_VARIES: Final = 1.3
"""90th over 10th percentile of RTT, by block means, from which RTT counts as varied; or twice that at the top."""

_RECENT_RTT: Final = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """A cell's samples in order, with what every fit needs of them."""

    samples: Samples
    weights: Array
    blocks: Blocks
    rtt: Array  # mean of the row's block; NaN where nobody told
    low: float  # 10th, 90th percentile of the blocks' RTT
    high: float
    floor: float
    now: float
    varies: bool


@dataclass(frozen=True, slots=True)
class Hits:
    """The hits: reference request, cost of lookup and fetch, and both together brought to the reference size."""

    rows: Samples
    prompt: float
    local: float
    matched: float
    running: float
    token_bytes: float
    flight: float
    lookup: Cost
    fetch: Cost
    remote: Array  # u + f at the reference size, seconds
    trust: Array
    weights: Array
    of: Ints
    rtt: Array


def rows_of(samples: Samples, half_life: float) -> Rows:
    """Orders samples by engine and time, cuts blocks, weighs by age."""
    engine = samples["engine"]
    at = samples["at"]
    newest = float(at.max())
    if np.ptp(engine) > 0.0:
        samples = samples.rows(np.argsort(engine, kind="stable"))
        engine = samples["engine"]
    weights = np.exp2((samples["at"] - newest) / half_life)
    rtt = samples["rtt"]
    blocks = cut(engine, rtt)
    known = rtt == rtt
    count = np.bincount(blocks.of, known, blocks.count)
    mean = np.bincount(blocks.of, np.where(known, rtt, 0.0), blocks.count) / np.maximum(count, 1.0)
    mean[count == 0] = np.nan
    low = high = floor = now = math.nan
    varies = False
    if known.any():
        every = np.sort(np.repeat(mean[count > 0], np.maximum(count[count > 0], 1.0).astype(np.intp)))
        low, high = (float(every[round(q * (every.size - 1))]) for q in (0.0, 1.0))
        floor, top = (float(every[round(q * (every.size - 1))]) for q in (0.1, 0.9))
        order = np.flatnonzero(known)
        last = order[np.argsort(samples["at"][order], kind="stable")[-_RECENT_RTT:]]
        now = float(np.median(rtt[last]))
        varies = top > RTT_VARIES * floor or high > 2.0 * RTT_VARIES * floor
        if varies:
            varies = _beyond_error(rtt[known], mean[blocks.of[known]], count[count > 0], mean[count > 0])
    return Rows(samples, weights, blocks, mean[blocks.of], low, high, floor, now, varies)


def _beyond_error(rtt: Array, block: Array, count: Array, mean: Array) -> bool:
    """Whether block means differ by more than the error of single measurements explains (F above 4)."""
    within = rtt.size - count.size
    if within < count.size / 2.0:
        return True
    error = float(np.square(rtt - block).sum()) / within
    total = float(np.average(np.square(mean - np.average(mean, weights=count)), weights=count)) * rtt.size
    return total / max(count.size - 1, 1) > 4.0 * error


def hits_of(rows: Rows, hit: Mask, looked: Mask) -> Hits:
    """Fits lookup and fetch, and brings every hit to the reference size."""
    own = rows.samples.rows(hit)
    prompt, local, matched, running = (float(own[name].mean()) for name in ("prompt", "local", "loaded", "running"))
    token_bytes = float(own["bytes"].sum() / own["loaded"].sum())
    tested = rows.samples
    of_looked = Blocks(rows.blocks.of[looked], rows.blocks.count, rows.blocks.chain)
    seen = np.where(np.isfinite(rows.rtt), rows.rtt, 0.0 if not np.isfinite(rows.floor) else rows.floor)
    lookup = fit_cost(
        tested["lookup"][looked], seen[looked], tested["matched"][looked] / matched, np.zeros(int(looked.sum())),
        tested["trips_lookup"][looked], rows.weights[looked], of_looked, varies=rows.varies,
    )  # fmt: skip
    index = np.flatnonzero(hit)
    size, seconds, trips = own["loaded"] / matched, own["fetch"], own["trips_fetch"]
    leaders, size, seconds, trips = _loads(own["batch"], size, seconds, trips)
    index = index[leaders]
    flight = np.maximum(np.nan_to_num(own["inflight"][leaders], nan=1.0) - 1.0, 0.0)
    of = rows.blocks.of[index]
    fetch = fit_cost(
        seconds, seen[index], size, flight, trips, rows.weights[index],
        Blocks(of, rows.blocks.count, rows.blocks.chain), varies=rows.varies,
    )  # fmt: skip
    typical = float(np.median(flight))
    alone = tested["lookup"][index]
    own_size = tested["loaded"][index] / matched
    expected = np.asarray(lookup.seconds(seen[index], own_size)) * (alone > 0.0)
    expected = expected + np.asarray(fetch.seconds(seen[index], size, flight))
    reference = np.asarray(lookup.seconds(seen[index], 1.0)) + np.asarray(fetch.seconds(seen[index], 1.0, typical))
    total = alone + seconds
    trust = _trust(np.log(np.maximum(total, 1e-9) / np.maximum(expected, 1e-9)), of)
    return Hits(
        rows=tested.rows(index), prompt=prompt, local=local, matched=matched, running=running,
        token_bytes=token_bytes, flight=typical, lookup=lookup, fetch=fetch,
        remote=_to_reference(total, total * reference / np.maximum(expected, 1e-9), size, flight - typical, of,
                             rows.weights[index] * trust), trust=trust, weights=rows.weights[index], of=of,
        rtt=seen[index],
    )  # fmt: skip


def _trust(residual: Array, of: Ints) -> Array:
    """Tukey's weights of log residuals about the middle of their block: a model that bends wrongly costs no row."""
    centre = np.full(residual.size, middle(residual))
    trust = np.ones(residual.size)
    thin = slice(None, None, max(1, residual.size // 512))
    for _ in range(2):
        apart = residual - centre
        spread = max(1.4826 * middle(np.abs(apart[thin])), 0.005)
        trust = np.square(np.clip(1.0 - np.square(apart / (4.685 * spread)), 0.0, None))
        count = np.bincount(of, trust)
        centre = np.where(count > 0.0, np.bincount(of, trust * residual) / np.maximum(count, 1e-12), 0.0)[of]
    return trust


def _to_reference(total: Array, ratio: Array, size: Array, flight: Array, of: Ints, weights: Array) -> Array:
    """Times brought to the reference size and crowd: by what size and crowd do within blocks, where RTT stands still.

    So a mean size that goes with RTT is not taken for its effect. dR/dsize is linear in the block's level, which it is
    when a constant part does not go with size. Where sizes differ between blocks only, `ratio` (by the linear model).
    """
    count = np.bincount(of, weights)
    safe = np.maximum(count, 1e-12)

    def mean(values: Array) -> Array:
        result: Array = (np.bincount(of, weights * values) / safe)[of]
        return result

    level = np.maximum(mean(ratio), 1e-9)
    inner, crowd = size - mean(size), flight - mean(flight)
    whole = size - np.average(size, weights=weights + 1e-12)
    if float(weights @ np.square(inner)) <= 0.2 * float(weights @ np.square(whole)) or total.size < 60:
        return ratio
    x = np.column_stack((inner * float(level.mean()), inner * level, crowd))
    w = weights / np.square(level)
    gram = x.T @ (x * w[:, None])
    gram.flat[::4] += 1e-9 * np.trace(gram) + 1e-30
    slope = np.linalg.solve(gram, x.T @ (w * (total - mean(total))))
    part = (slope[0] * float(level.mean()) + slope[1] * level) * (size - 1.0) + slope[2] * flight
    moved: Array = np.maximum(total - part, 1e-9)
    return moved


def _loads(batch: Array, size: Array, seconds: Array, trips: Array) -> tuple[Ints, Array, Array, Array]:
    """Loads that share a batch id as one: sizes and round trips added up, the time once."""
    index = np.arange(batch.size)
    if not batch.any():
        return index, size, seconds, trips
    key = np.where(batch > 0.0, batch, -1.0 - index)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    if first.size == batch.size:
        return index, size, seconds, trips
    longest = np.zeros(first.size)
    np.maximum.at(longest, inverse, seconds)
    order = np.argsort(first)
    added = np.bincount(inverse, size)
    counted = np.bincount(inverse, trips)
    return first[order], added[order], longest[order], counted[order]
