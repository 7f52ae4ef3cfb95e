"""Rows of a cell in order, and its hits brought to one reference request."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from guard.estimate.blocks import Blocks, Ints, cut
from guard.estimate.linear import mean as mean_of
from guard.estimate.linear import median, middle
from guard.estimate.remote import Cost, fit_cost
from guard.estimate.samples import Array, Samples

RTT_VARIES: Final = 1.3
"""90th over 10th percentile of RTT, by block means, from which RTT counts as varied; or twice that at the top."""

_RECENT_RTT: Final = 16
_QUANTILES: Final = np.array([0.0, 0.1, 0.9, 1.0])


@dataclass(frozen=True, slots=True)
class Rows:
    """A cell's samples in order, with what every fit needs of them."""

    samples: Samples
    weights: Array
    blocks: Blocks
    rtt: Array  # mean of the row's block; NaN where nobody told
    low: float  # lowest and highest of the blocks' RTT, and its 10th percentile
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
    spread: float  # noise of log(u + f) about the models
    trust: Array
    weights: Array
    of: Ints
    rtt: Array

    @property
    def mean_factor(self) -> float:
        """Mean over median of what a read takes."""
        return math.exp(0.5 * min(self.spread, 2.0) ** 2)


def rows_of(samples: Samples, half_life: float) -> Rows:
    """Orders samples by engine and time, cuts blocks, weighs by age."""
    told = samples["rtt"]
    last = told[np.flatnonzero(told == told)[-_RECENT_RTT:]]  # rows come in time
    samples = samples.rows(_by_engine(samples["engine"]))
    weights = np.exp2((samples["at"] - float(samples["at"].max())) / half_life)
    rtt = samples["rtt"]
    blocks = cut(samples["engine"], rtt)
    known = rtt == rtt
    count = np.bincount(blocks.of, known, blocks.count)
    mean = np.bincount(blocks.of, np.where(known, rtt, 0.0), blocks.count) / np.maximum(count, 1.0)
    mean[count == 0] = np.nan
    every = mean.take(blocks.of)
    low = high = floor = now = math.nan
    varies = False
    if known.any():
        order = np.argsort(mean)  # NaN last
        rank = np.cumsum(count[order])
        at = np.searchsorted(rank, np.round((rank[-1] - 1.0) * _QUANTILES), "right")
        low, floor, top, high = mean[order[at]].tolist()
        now = median(last)
        varies = top > RTT_VARIES * floor or high > 2.0 * RTT_VARIES * floor
        if varies:
            varies = _beyond_error(rtt[known], every[known], count[count > 0], mean[count > 0])
    return Rows(samples, weights, blocks, every, low, high, floor, now, varies)


def _by_engine(engine: Array) -> Ints:
    """Order of rows by engine, else as they came: two radix sorts of 16 bits take a fifth of one of floats."""
    key = engine.astype(np.int64)
    order = np.argsort((key & 0xFFFF).astype(np.uint16), kind="stable")
    return order[np.argsort((key >> 16 & 0xFFFF).astype(np.uint16)[order], kind="stable")]


def _beyond_error(rtt: Array, block: Array, count: Array, mean: Array) -> bool:
    """Whether block means differ by more than the error of single measurements explains (F above 4)."""
    within = rtt.size - count.size
    if within < count.size / 2.0:
        return True
    error = float(np.square(rtt - block).sum()) / within
    total = mean_of(np.square(mean - mean_of(mean, count)), count) * rtt.size
    return total / max(count.size - 1, 1) > 4.0 * error


def hits_of(rows: Rows, hit: Ints, looked: Ints, *, sends_local: bool = False) -> Hits:
    """Fits lookup and fetch, and brings every hit to the reference size.

    `sends_local`: a lookup's size is what matched together with what vLLM held itself.
    """
    own = rows.samples.rows(hit)
    prompt, local, matched, running = (float(own[name].mean()) for name in ("prompt", "local", "loaded", "running"))
    token_bytes = float(own["bytes"].sum() / own["loaded"].sum())
    seen = np.where(rows.rtt == rows.rtt, rows.rtt, rows.floor if math.isfinite(rows.floor) else 0.0)
    tested = rows.samples.rows(looked)
    sent = tested["matched"] + tested["local"] if sends_local else tested["matched"]
    lookup = fit_cost(
        tested["lookup"], seen.take(looked), sent / matched, np.zeros(looked.size),
        tested["trips_lookup"], rows.weights.take(looked),
        Blocks(rows.blocks.of.take(looked), rows.blocks.count, rows.blocks.chain), varies=rows.varies,
    )  # fmt: skip
    leaders, size, seconds, trips = _loads(own["batch"], own["loaded"] / matched, own["fetch"], own["trips_fetch"])
    index = hit.take(leaders)
    if leaders.size < len(own):
        own = rows.samples.rows(index)
    flight = np.fmax(own["inflight"] - 1.0, 0.0)  # NaN: alone
    of, rtt, weights = rows.blocks.of.take(index), seen.take(index), rows.weights.take(index)
    fetch = fit_cost(
        seconds, rtt, size, flight, trips, weights, Blocks(of, rows.blocks.count, rows.blocks.chain),
        varies=rows.varies,
    )  # fmt: skip
    typical = median(flight)
    alone = own["lookup"]
    asked, usual, whole = own["loaded"] / matched, 1.0, size  # bytes in mean hits: of lookups, usual ones, and in all
    if sends_local:
        asked, usual = asked + own["local"] / matched, 1.0 + local / matched
        whole = asked / usual
    expected = np.asarray(lookup.seconds(rtt, asked)) * (alone > 0.0)
    expected = np.maximum(expected + np.asarray(fetch.seconds(rtt, size, flight)), 1e-9)
    reference = np.asarray(lookup.seconds(rtt, usual)) + np.asarray(fetch.seconds(rtt, 1.0, typical))
    total = alone + seconds
    ratio = total / expected
    residual = np.log(np.maximum(ratio, 1e-9))
    remote, trust = _to_reference(total, ratio * reference, residual, whole, flight - typical, of, weights)
    return Hits(
        rows=own, prompt=prompt, local=local, matched=matched, running=running,
        token_bytes=token_bytes, flight=typical, lookup=lookup, fetch=fetch,
        remote=remote, spread=1.4826 * middle(np.abs(residual - middle(residual))), trust=trust, weights=weights,
        of=of, rtt=rtt,
    )  # fmt: skip


def _trust(residual: Array, of: Ints) -> Array:
    """Tukey's weights of log residuals about the middle of their block: a model that bends wrongly costs no row."""
    centre = np.full(residual.size, middle(residual))
    trust = np.ones(residual.size)
    thin = slice(None, None, max(1, residual.size // 512))
    for _ in range(2):
        apart = residual - centre
        spread = max(1.4826 * middle(np.abs(apart[thin])), 0.005)
        trust = np.square(np.maximum(1.0 - np.square(apart / (4.685 * spread)), 0.0))
        count = np.bincount(of, trust)
        centre = (np.bincount(of, trust * residual) / np.maximum(count, 1e-12)).take(of)
    return trust


def _to_reference(
    total: Array, ratio: Array, residual: Array, size: Array, flight: Array, of: Ints, weights: Array
) -> tuple[Array, Array]:
    """Times brought to the reference size and crowd, and how far each row is believed.

    `ratio` and `residual` are what the linear models say. They bend wrongly at a knee, and weights about a wrong model
    pull towards it (reads at the floor RTT came out 0.3 % low where size goes with RTT): once more, about the blocks.
    """
    remote, trust = ratio, _trust(residual, of)
    for last in (False, True):  # a third turn changes nothing
        means = _Means(of, weights * trust)
        part = _part(total, remote, size, flight, means)
        if part is None:
            break
        remote = np.maximum(total - part, 1e-9)
        if not last:
            expected = np.maximum(means(remote) + part, 1e-9)
            trust = _trust(np.log(np.maximum(total, 1e-9) / expected), of)
    return remote, trust


def _part(total: Array, level: Array, size: Array, flight: Array, means: "_Means") -> Array | None:
    """Seconds that a row's size and crowd add: by what they do within blocks, where RTT stands still.

    So a mean size that goes with RTT is not taken for its effect. dR/dsize is linear in the block's level, which it is
    when a constant part does not go with size. None where sizes differ between blocks only.
    """
    weights = means.weights
    inner = size - means(size)
    whole = size - mean_of(size, weights + 1e-12)
    if float(weights @ np.square(inner)) <= 0.2 * float(weights @ np.square(whole)) or total.size < 60:
        return None
    level = np.maximum(means(level), 1e-9)
    overall = float(level.mean())
    x = np.stack((inner * overall, inner * level, flight - means(flight)))
    weighted = x * (weights / np.square(level))
    gram = weighted @ x.T
    gram.flat[::4] += 1e-9 * np.trace(gram) + 1e-30
    slope = np.linalg.solve(gram, weighted @ (total - means(total)))
    part: Array = (slope[0] * overall + slope[1] * level) * (size - 1.0) + slope[2] * flight
    return part


class _Means:
    """Weighted means of the block of every row."""

    def __init__(self, of: Ints, weights: Array) -> None:
        self.weights = weights
        self._of = of
        self._count = np.maximum(np.bincount(of, weights), 1e-12)

    def __call__(self, values: Array) -> Array:
        result: Array = (np.bincount(self._of, self.weights * values) / self._count).take(self._of)
        return result


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
