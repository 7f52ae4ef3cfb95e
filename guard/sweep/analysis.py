"""What the measured curves say, without a model: where TTFT departs, where remote stops paying, round trips in a row.

    departure    RTT at which the remote TTFT is (1 + g) times that of the fastest tier
    break-even   RTT at which the remote TTFT is that of recomputing
    round trips  slope of the remote TTFT over RTT (Theil and Sen: median of the slopes of all pairs of tiers)

TTFT of a tier is the median of its requests. Between tiers the curve is a straight line, made non-decreasing (running
maximum), since more RTT makes no read faster. Intervals: 95 %, bootstrap over the requests of each tier (percentiles of
`RESAMPLES` curves). A crossing that does not happen in the range counts as beyond it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from guard.estimate.shapes import Figure
from guard.sweep.plan import Road
from guard.sweep.results import Measured, Sample

RESAMPLES: Final = 2000
DEPARTURE_GAIN: Final = 0.1
_FEW: Final = 5

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of a curve, seconds: RTT added and seen, TTFT per road, and how far the requests of the road strayed."""

    added: float
    rtt: float
    remote: Figure
    recompute: Figure
    local: Figure
    strays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All tiers at one concurrency, fastest first, and what they say."""

    concurrency: int
    prompt_tokens: float
    loaded_tokens: float
    tiers: tuple[Tier, ...]
    recompute: Figure
    local: Figure
    departure: Figure
    break_even: Figure
    round_trips: Figure
    reported_round_trips: float | None
    words: str


def curves(cells: Iterable[Measured], seed: int = 0) -> list[Curve]:
    """One curve per concurrency."""
    by_concurrency: dict[int, list[Measured]] = defaultdict(list)
    for cell in cells:
        by_concurrency[cell.cell.concurrency].append(cell)
    rng = np.random.default_rng(seed)
    return [_curve(c, found, rng) for c, found in sorted(by_concurrency.items())]


def crossing(rtts: Array, ttfts: Array, level: Array) -> Array:
    """RTT at which each row of `ttfts` (rows x tiers) reaches its `level`; infinity where it never does.

    A row that is there from the first tier on gives that tier's RTT.
    """
    risen = np.maximum.accumulate(ttfts, axis=1)
    over = risen >= level[:, None]
    first = np.where(over.any(axis=1), over.argmax(axis=1), -1)
    rows = np.arange(len(risen))
    before = np.maximum(first - 1, 0)
    y0, y1 = risen[rows, before], risen[rows, first]
    share = np.where(y1 > y0, (level - y0) / np.where(y1 > y0, y1 - y0, 1.0), 0.0)
    found = rtts[before] + share * (rtts[first] - rtts[before])
    return np.where(first < 0, np.inf, np.where(first == 0, rtts[0], found))


def _curve(concurrency: int, cells: list[Measured], rng: np.random.Generator) -> Curve:
    added = sorted({cell.cell.rtt for cell in cells})
    remote = {rtt: _ttfts(cells, "remote", rtt) for rtt in added}
    added = [rtt for rtt in added if remote[rtt].size]
    rtts = np.array([_seen(cells, rtt) for rtt in added])
    computed, local = _ttfts(cells, "recompute"), _ttfts(cells, "local")
    draws = np.stack([_medians(remote[rtt], rng) for rtt in added], axis=1) if added else np.empty((RESAMPLES, 0))
    middle = np.array([[np.median(remote[rtt]) for rtt in added]])
    enough = len(added) >= 2 and min(remote[rtt].size for rtt in added) >= _FEW
    n = int(sum(remote[rtt].size for rtt in added))
    gain = 1.0 + DEPARTURE_GAIN
    departure = _crossing(rtts, middle, draws, middle[:, 0] * gain, draws[:, 0] * gain, n) if enough else _too_few(n)
    if enough and computed.size >= _FEW:
        level = np.array([np.median(computed)])
        break_even = _crossing(rtts, middle, draws, level, _medians(computed, rng), n + computed.size)
    else:
        break_even = _too_few(n)
    samples = [sample for cell in cells if cell.cell.road == "remote" for sample in cell.samples]
    recompute = _figure(computed, rng)
    curve = Curve(
        concurrency=concurrency,
        prompt_tokens=_median([sample.prompt for sample in samples]) or 0.0,
        loaded_tokens=_median([sample.loaded for sample in samples]) or 0.0,
        tiers=tuple(
            Tier(
                added=rtt,
                rtt=float(rtts[number]),
                remote=_figure(remote[rtt], rng),
                recompute=_figure(_ttfts(cells, "recompute", rtt), rng),
                local=_figure(_ttfts(cells, "local", rtt), rng),
                strays=sum(cell.strays for cell in cells if cell.cell.rtt == rtt and cell.cell.road != "local"),
            )
            for number, rtt in enumerate(added)
        ),
        recompute=recompute,
        local=_figure(local, rng),
        departure=departure,
        break_even=break_even,
        round_trips=_slope(rtts, middle, draws, n) if enough else _too_few(n),
        reported_round_trips=_median([s.round_trips for s in samples if s.round_trips is not None]),
        words="",
    )
    return _worded(curve)


def _ttfts(cells: list[Measured], road: Road, rtt: float | None = None) -> Array:
    found: list[Sample] = [
        sample
        for cell in cells
        if cell.cell.road == road and (rtt is None or cell.cell.rtt == rtt)
        for sample in cell.samples
    ]
    return np.array([sample.ttft for sample in found])


def _seen(cells: list[Measured], added: float) -> float:
    """The idle RTT of a tier: as measured while it stood, or else what was added."""
    found = [cell.rtt for cell in cells if cell.cell.rtt == added and cell.rtt is not None]
    return float(np.median(found)) if found else added


def _medians(values: Array, rng: np.random.Generator) -> Array:
    return np.asarray(np.median(rng.choice(values, (RESAMPLES, values.size)), axis=1), dtype=np.float64)


def _figure(values: Array, rng: np.random.Generator) -> Figure:
    if values.size < _FEW:
        value = float(np.median(values)) if values.size else None
        return Figure(value=value, n=values.size, reason="too few requests for an interval" if values.size else "none")
    low, high = np.quantile(_medians(values, rng), (0.025, 0.975))
    return Figure(value=float(np.median(values)), low=float(low), high=float(high), n=values.size)


def _crossing(rtts: Array, middle: Array, draws: Array, level: Array, levels: Array, n: int) -> Figure:
    at = float(crossing(rtts, middle, level)[0])
    low, high = np.quantile(crossing(rtts, draws, levels), (0.025, 0.975), method="nearest")
    floor, last = float(rtts[0]), float(rtts[-1])
    reason = ""
    if at == np.inf:
        reason = f"none in range: not reached at {last * 1e3:g} ms"
    elif at <= floor:
        reason = f"reached at the fastest tier already ({floor * 1e3:g} ms)"
    return Figure(
        value=_finite(at), low=_finite(float(low)), high=_finite(float(high)), n=n, reason=reason
    )  # an end that is None lies beyond the last tier


def _slope(rtts: Array, middle: Array, draws: Array, n: int) -> Figure:
    i, j = np.triu_indices(len(rtts), 1)
    apart = rtts[j] - rtts[i]
    i, j, apart = i[apart > 0.0], j[apart > 0.0], apart[apart > 0.0]
    if not apart.size:
        return Figure(value=None, n=n, reason="constant RTT")
    slopes = np.median((draws[:, j] - draws[:, i]) / apart, axis=1)
    low, high = np.quantile(slopes, (0.025, 0.975))
    value = float(np.median((middle[0, j] - middle[0, i]) / apart))
    return Figure(value=value, low=float(low), high=float(high), n=n)


def _worded(curve: Curve) -> Curve:
    first = curve.tiers[0] if curve.tiers else None
    if first is None or first.remote.value is None or curve.recompute.value is None:
        return replace(curve, words=f"Concurrency {curve.concurrency}: not enough was measured.")
    hit = f"a remote hit of {curve.loaded_tokens:.0f} of {curve.prompt_tokens:.0f} tokens"
    fastest = f"takes {_ms(first.remote.value)} to its first token at an RTT of {_ms(first.rtt)}"
    words = [f"Concurrency {curve.concurrency}: {hit} {fastest}; recomputing takes {_ms(curve.recompute.value)}."]
    if curve.departure.value is None:
        words.append(f"TTFT does not depart from that by {DEPARTURE_GAIN:.0%} ({curve.departure.reason}).")
    else:
        words.append(f"TTFT is {DEPARTURE_GAIN:.0%} above that from an RTT of {_range(curve.departure)} on.")
    if curve.break_even.reason.startswith("reached"):
        words.append("Offload loses at every tier: stay local.")
    elif curve.break_even.value is None:
        words.append(f"Offload pays at every tier that was measured ({curve.break_even.reason or 'no figure'}).")
    else:
        words.append(f"Offload stops paying at an RTT of {_range(curve.break_even)}.")
    if curve.round_trips.value is not None and (curve.round_trips.high or 0.0) < 0.5:
        words.append("TTFT hardly follows the RTT that was added: does the injector stand in the road of the reads?")
    return replace(curve, words=" ".join(words))


def _range(figure: Figure) -> str:
    low = "?" if figure.low is None else _ms(figure.low)
    high = "beyond the last tier" if figure.high is None else _ms(figure.high)
    return f"{_ms(figure.value or 0.0)} [{low}, {high}]"


def three_digits(value: float) -> str:
    """To three significant digits, in full: 2,280 rather than 2.28e+03."""
    return f"{float(f'{value:.3g}'):,g}"


def _ms(seconds: float) -> str:
    return f"{three_digits(seconds * 1e3)} ms"


def _too_few(n: int) -> Figure:
    return Figure(value=None, n=n, reason=f"insufficient data: two tiers of {_FEW} requests are needed")


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
