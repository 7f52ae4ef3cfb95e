"""Everything about one backend and class from its samples: models, figures, verdict."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from guard.connectors import capability_of_label
from guard.estimate import curve as curves
from guard.estimate import inflection
from guard.estimate.blocks import Ints
from guard.estimate.hits import Hits, Rows, hits_of, rows_of
from guard.estimate.inflection import Parts
from guard.estimate.level import curve_of, recent_factor
from guard.estimate.linear import mean, median
from guard.estimate.prefill import Prefill, fit_prefill
from guard.estimate.samples import REMOTE, Array, Samples
from guard.estimate.shapes import (
    PRIOR_BREAK_EVEN_RTT,
    PRIOR_DEPARTURE_RTT,
    Cell,
    FetchModel,
    Figure,
    LookupModel,
)
from guard.estimate.verdict import Evidence, judge

HALF_LIFE: Final = 900.0
"""Seconds after which a sample counts half."""

_STEPS: Final = np.linspace(0.0, 1.0, 60)  # of sizes tried, in ratios

LEAST_HITS: Final = 4
"""Fewer hits than this say nothing, not even that they are slow."""


def estimate(
    model: str,
    backend: str,
    class_: str,
    samples: Samples,
    *,
    pool: Prefill | None = None,
    half_life: float = HALF_LIFE,
) -> tuple[Cell, Prefill | None]:
    """The cell of these samples, and its prefill model. `pool` stands in where nothing was computed in full here.

    `backend` is its label, `kind/address`: the kind tells whether a lookup is sent what vLLM holds itself.
    """
    bare = Cell(model=model, backend=backend, class_=class_, n=len(samples))
    if not len(samples):
        return bare, None
    rows = rows_of(samples, half_life)
    prefill = fit_prefill(rows.samples, rows.weights, rows.blocks)
    bare = replace(
        bare, prefill=prefill.model if prefill else None,
        rtt_floor=_known(rows.floor), rtt_now=_known(rows.now), rtt_low=_known(rows.low), rtt_high=_known(rows.high),
    )  # fmt: skip
    looked = np.flatnonzero(rows.samples["lookup"] > 0.0)
    hit = np.flatnonzero(
        (rows.samples["road"] == REMOTE) & (rows.samples["loaded"] > 0.0) & (rows.samples["fetch"] > 0.0)
        & ~(rows.samples["failed"] > 0.0)
    )  # fmt: skip
    if hit.size < LEAST_HITS:
        return _without_hits(bare, rows, looked, hit), prefill
    hits = hits_of(rows, hit, looked, sends_local=capability_of_label(backend).lookup_moves_data)
    if pool is not None and (prefill is None or not prefill.supports(hits.prompt - hits.local)):
        return _cell(bare, rows, hits, looked, pool, own=False), prefill
    return _cell(bare, rows, hits, looked, prefill, own=True), prefill


def _cell(bare: Cell, rows: Rows, hits: Hits, looked: Ints, prefill: Prefill | None, *, own: bool) -> Cell:
    """`own`: the prefill model is of these rows, not of the pool's."""
    n = len(hits.rows)
    lookup, fetch = hits.lookup, hits.fetch
    unit = hits.matched * (hits.token_bytes or 1.0)
    found = rows.samples["matched"].take(looked) > 0.0
    share, share_error = _share(found, rows, looked)
    held, held_prompt, held_slope = _held(rows, looked[found])
    sends_local = capability_of_label(bare.backend).lookup_moves_data
    curve, level, pull = curve_of(rows, hits)
    draws = curve.draws if curve is not None else level
    rest, rest_error = _rest(rows, hits)
    saved, saved_error, common = 0.0, 0.0, inflection.NOTHING
    if prefill is not None:
        saved, saved_error, other = prefill.saved(hits.prompt, hits.local, hits.matched, hits.running)
        if own:  # else of other blocks
            common = inflection.in_common(draws.at(mean(hits.rtt, hits.weights)), pull, other)
        rest += prefill.mean(hits.prompt, max(hits.prompt - hits.local - hits.matched, 1.0), hits.running)
    supported = prefill is not None and prefill.supports(hits.prompt - hits.local)
    missed = looked[~found]
    sent = mean(rows.samples["local"].take(missed), rows.weights.take(missed)) if sends_local and missed.size else 0.0
    miss_level, miss_slope, miss_cov = lookup.line(sent / hits.matched, 0.0)
    factor = lookup.mean_factor
    parts = Parts(
        (saved, saved_error), (rest, rest_error),
        (miss_level * factor, miss_slope * factor, miss_cov * factor * factor), (share, share_error), common,
    )  # fmt: skip
    now = rows.now if math.isfinite(rows.now) else 0.0
    recent = recent_factor(hits, curve)
    remote_now = draws.at(now) * recent
    hit_draws = parts.draw_hit()
    m_level, m_slope = parts.draw_miss()
    cost = hit_draws * (remote_now - parts.draw_saved()) + (1.0 - hit_draws) * (m_level + m_slope * now)
    unknown = "insufficient-data: no request of this size was computed in full"
    evidence = Evidence(
        rows=rows.samples, hit_rows=hits.rows, of=hits.of, rtt=hits.rtt, remote=hits.remote, trust=hits.trust,
        blocks=rows.blocks.count, curve=curve, varies=rows.varies, rest=rest, prefill=prefill, lookup=lookup,
        fetch=fetch, flight=hits.flight, now=now, recent=recent,
        net=inflection.interval(cost) if supported else None,
        computed=hits.prompt - hits.local,
    )  # fmt: skip
    if curve is not None:
        departure = inflection.departure(curve, parts, rows.floor, rows.high, n)
        even = inflection.break_even(curve, parts, rows.high, n) if supported else _prior(PRIOR_BREAK_EVEN_RTT, unknown)
        bend = inflection.knee(curve, parts, n)
        slope, error = float(curve.line.beta[0]), curve.slope_error * curves.t_squared(curve.freedom) ** 0.5
        trips = Figure(value=max(slope, 0.0), low=max(slope - error, 0.0), high=slope + error, n=n)
        token = Figure(value=None, n=n, reason="RTT varied: see departure and break-even")
    else:
        why = f"insufficient-data: {_no_curve(rows)}"
        departure, even = _prior(PRIOR_DEPARTURE_RTT, why, n), _prior(PRIOR_BREAK_EVEN_RTT, why, n)
        bend = trips = Figure(value=None, n=n, reason=why)
        centre, low, high = inflection.interval(remote_now / hits.matched)
        token = Figure(value=centre, low=max(low, 0.0), high=high, n=n)
    centre, low, high = inflection.interval(remote_now)
    remote_figure = Figure(value=centre, low=low, high=high, n=n)
    saved_figure = (
        Figure(
            value=saved, low=saved - 2.0 * saved_error, high=saved + 2.0 * saved_error,
            n=prefill.model.n if prefill else 0, source="projected" if not supported else "measured",
            reason="" if supported else unknown,
        )
        if prefill is not None
        else Figure(value=None, reason="insufficient-data: no prefill was seen")
    )  # fmt: skip
    centre, low, high = inflection.interval(m_level + m_slope * now)
    miss_n = int(np.count_nonzero(~found))
    net_figure = (
        Figure(value=evidence.net[0], low=evidence.net[1], high=evidence.net[2], n=n)
        if evidence.net
        else Figure(value=None, n=n, reason=unknown)
    )
    flight_bytes = fetch.flight / unit
    return replace(
        bare,
        fetch=FetchModel(
            t0=fetch.t0, kappa=fetch.trips, kappa_per_byte=fetch.trips_size / unit,
            seconds_per_byte=fetch.size_cost / unit, seconds_per_inflight_byte=flight_bytes, spread=fetch.spread,
            n=fetch.n,
        ),
        lookup=LookupModel(
            t0=lookup.t0, kappa=lookup.trips, kappa_per_byte=lookup.trips_size / unit,
            seconds_per_byte=lookup.size_cost / unit, hit_probability=share, expected_tokens=hits.matched,
            held_tokens=held, held_prompt=held_prompt, held_per_token=held_slope, sends_local=sends_local,
            spread=lookup.spread, n=lookup.n,
        ),
        prefill=prefill.model if prefill is not None else None,
        bytes_per_token=hits.token_bytes or 1.0,
        reference_tokens=hits.prompt, reference_matched=hits.matched, reference_local=hits.local, rest=rest,
        read_spread=hits.spread,
        saved=saved_figure, remote_now=remote_figure,
        lookup_cost=Figure(value=centre, low=max(low, 0.0), high=high, n=miss_n, reason="" if miss_n else "no misses"),
        net_cost=net_figure, least_tokens=_least_tokens(hits, prefill if supported else None, now, recent, sends_local),
        departure=departure, break_even=even, knee=bend, seconds_per_token=token, serial_round_trips=trips,
        verdict=judge(evidence, departure, bend),
    )  # fmt: skip


def _rest(rows: Rows, hits: Hits) -> tuple[float, float]:
    """Mean wait of a hit besides lookup, fetch and prefill, and its standard error by blocks."""
    wait = hits.rows["before"] + hits.rows["slot"] + hits.rows["resume"]
    wait = np.minimum(wait, 10.0 * median(wait) + 1e-3)
    count = np.bincount(hits.of, hits.weights, rows.blocks.count)
    used = count > 0.0
    count = count[used]
    per_block = np.bincount(hits.of, hits.weights * wait, rows.blocks.count)[used] / count
    overall = mean(per_block, count)
    return overall, math.sqrt(mean(np.square(per_block - overall), count) / max(per_block.size - 1, 1))


def _share(found: Array, rows: Rows, looked: Ints) -> tuple[float, float]:
    """Share of hits among those looked up, and its standard error: between blocks, at the least binomial."""
    weights, of = rows.weights.take(looked), rows.blocks.of.take(looked)
    total = np.bincount(of, weights, rows.blocks.count)
    hit = np.bincount(of, weights * found, rows.blocks.count)
    n = found.size
    share = float(hit.sum() / total.sum())
    binomial = share * (1.0 - share) / n
    used = total > 0.0
    blocks = int(np.count_nonzero(used))
    between = float(np.square(hit[used] - share * total[used]).sum()) / float(total.sum()) ** 2
    between *= blocks / max(blocks - 1, 1)
    return share, math.sqrt(max(binomial, between))


def _held(rows: Rows, found: Ints) -> tuple[float, float, float]:
    """Of prompts that hit: mean tokens held here or there, mean prompt, and the slope between them within 0 and 1."""
    if not found.size:
        return 0.0, 0.0, 0.0
    weights = rows.weights.take(found)
    prompt = rows.samples["prompt"].take(found)
    held = (rows.samples["local"] + rows.samples["matched"]).take(found)
    middle, level = mean(prompt, weights), mean(held, weights)
    apart = prompt - middle
    spread = float(weights @ np.square(apart))
    slope = float(weights @ (apart * (held - level))) / spread if spread > 0.0 else 0.0
    return level, middle, min(max(slope, 0.0), 1.0)


def _least_tokens(hits: Hits, prefill: Prefill | None, now: float, recent: float, sends_local: bool) -> Figure:
    """Fewest matched tokens from which a read pays now, for a prompt of the reference length."""
    n = len(hits.rows)
    if prefill is None:
        return Figure(value=None, n=n, reason="insufficient-data: no request of this size was computed in full")
    full = hits.prompt - hits.local
    sizes = np.round(max(full - 1.0, 2.0) ** _STEPS)
    b = sizes / hits.matched
    local = hits.local / hits.matched if sends_local else 0.0
    remote = np.asarray(hits.lookup.seconds(now, b + local)) + np.asarray(hits.fetch.seconds(now, b, hits.flight))
    remote = remote * hits.mean_factor * recent
    left = np.append(full, np.maximum(full - sizes, 1.0))
    seconds = prefill.seconds(hits.prompt, left, hits.running)
    pays = remote < (seconds[0] - seconds[1:]) * prefill.mean_factor
    if not pays[-1]:
        return Figure(value=None, n=n, source="projected", reason="no size pays now")
    losing = np.flatnonzero(~pays)
    first = float(sizes[losing[-1] + 1]) if losing.size else 1.0
    return Figure(value=first, n=n, source="projected")


def _without_hits(bare: Cell, rows: Rows, looked: Ints, hit: Ints) -> Cell:
    """What can be said without remote reads: what a lookup costs, and why there is nothing else."""
    hits, asked = hit.size, looked.size
    if not asked:
        why = "insufficient-data: nothing was looked up"
    elif hits == 0:
        why = f"insufficient-data: none of {asked} lookups led to a read"
    else:
        why = f"insufficient-data: {hits} of {LEAST_HITS} reads"
    nothing = Figure(value=None, n=hits, reason=why)
    cost, lookup = nothing, None
    if asked:
        seconds = rows.samples["lookup"][looked]
        centre = float(np.median(seconds))
        error = 1.2533 * float(seconds.std()) / math.sqrt(asked) * 1.96
        cost = Figure(value=centre, low=max(centre - error, 0.0), high=centre + error, n=asked)
        lookup = LookupModel(t0=centre, hit_probability=float((rows.samples["matched"][looked] > 0.0).mean()), n=asked)
    return replace(
        bare, lookup=lookup, lookup_cost=cost, departure=_prior(PRIOR_DEPARTURE_RTT, why, hits),
        break_even=_prior(PRIOR_BREAK_EVEN_RTT, why, hits), knee=nothing, seconds_per_token=nothing,
        serial_round_trips=nothing, verdict=replace(bare.verdict, reason=why),
    )  # fmt: skip


def _no_curve(rows: Rows) -> str:
    if not math.isfinite(rows.floor):
        return "no RTT is known"
    if not rows.varies:
        return f"RTT did not vary ({rows.low * 1e3:.3g} to {rows.high * 1e3:.3g} ms)"
    return "too few stretches of constant RTT"


def _prior(value: float, why: str, n: int = 0) -> Figure:
    return Figure(value=value, n=n, source="prior", reason=why)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def thin(cell: Cell, pool: Cell) -> Cell:
    """A class with too few hits of its own: the pool's models and figures under the class's name, and its own n."""
    return replace(pool, class_=cell.class_, n=cell.n, pooled=True, rtt_now=cell.rtt_now or pool.rtt_now)


def hits_in(samples: Sequence[Samples] | Samples) -> int:
    """Remote reads that succeeded."""
    parts = [samples] if isinstance(samples, Samples) else samples
    return sum(int(np.count_nonzero((part["road"] == REMOTE) & (part["loaded"] > 0.0))) for part in parts)
