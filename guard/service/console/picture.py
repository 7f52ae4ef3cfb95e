"""Everything that the inflection picture shows, for one backend and class (pure)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from guard.correlate.against_rtt import against_rtt, rtt_of
from guard.estimate.shapes import POOL, Cell
from guard.wire import RequestRecord

NOW_SECONDS: Final = 15.0
"""Where we are now: the median over the requests that arrived within so many seconds."""

CURVE_POINTS: Final = 49
_ROOM: Final = 1.5  # how far the axis goes beyond what is on it, as a factor


def picture(
    records: Sequence[RequestRecord],
    cells: Sequence[Cell],
    now_ns: int,
    *,
    model: str | None = None,
    backend: str | None = None,
    class_: str = POOL,
) -> dict[str, Any]:
    """The body of `GET /v1/picture`. `choices` are all pairs of model and backend; `picture` is null without any."""
    counts = Counter((record.model, record.backend, record.class_) for record in records if record.backend)
    pairs = Counter[tuple[str, str]]()
    for (of_model, of_backend, _), n in counts.items():
        pairs[of_model, of_backend] += n
    choices = [
        {
            "model": key[0],
            "backend": key[1],
            "n": n,
            "classes": sorted(cls for (m, b, cls) in counts if (m, b) == key),
        }
        for key, n in sorted(pairs.items())
    ]
    wanted = [
        key for key in pairs if (model is None or key[0] == model) and (backend is None or key[1] == backend)
    ]  # fmt: skip
    if not wanted:
        return {"choices": choices, "picture": None}
    chosen = max(wanted, key=lambda key: (pairs[key], key))
    found = [
        record
        for record in records
        if (record.model, record.backend) == chosen and class_ in (POOL, record.class_)
    ]  # fmt: skip
    cell = next(
        (one for one in cells if (one.model, one.backend, one.class_) == (*chosen, class_)),
        Cell(model=chosen[0], backend=chosen[1], class_=class_),
    )
    return {"choices": choices, "picture": _picture(cell, found, now_ns)}


def _picture(cell: Cell, records: list[RequestRecord], now_ns: int) -> dict[str, Any]:
    points = against_rtt(records)
    rtts = [rtt for record in records if (rtt := rtt_of(record))]
    latest = [record for record in records if record.arrival_ns >= now_ns - int(NOW_SECONDS * 1e9)]
    now = _median([rtt for record in latest if (rtt := rtt_of(record))])
    shown = [*rtts, *(value for value in (cell.departure.value, cell.break_even.value, cell.rtt_now) if value)]
    low, high = (min(shown) / _ROOM, max(shown) * _ROOM) if shown else (1e-4, 1e-2)
    return {
        "model": cell.model,
        "backend": cell.backend,
        "class": cell.class_,
        "n": len(records),
        "simulated": sum(record.simulated for record in records),
        "rtt": {
            "now": now if now is not None else cell.rtt_now,
            "floor": cell.rtt_floor,
            "low": cell.rtt_low if cell.rtt_low is not None else min(rtts, default=None),
            "high": cell.rtt_high if cell.rtt_high is not None else max(rtts, default=None),
        },
        "now": {
            "ttft": _median([record.ttft for record in latest if record.ttft is not None and not record.aborted]),
            "n": len(latest),
            "seconds": NOW_SECONDS,
        },
        "axis": {"low": low, "high": high},
        "points": points,
        "curves": curves(cell, low, high),
        "departure": asdict(cell.departure),
        "break_even": asdict(cell.break_even),
        "knee": asdict(cell.knee),
        "seconds_per_token": asdict(cell.seconds_per_token),
        "verdict": asdict(cell.verdict),
        "pooled": cell.pooled,
        "reference": {"prompt_tokens": cell.reference_tokens, "matched_tokens": cell.reference_matched},
    }


def curves(cell: Cell, low: float, high: float) -> dict[str, Any] | None:
    """Projected TTFT of the cell's reference hit over RTT, read and recomputed; None until the models are fitted.

    Break-even is left of where the lines cross: it counts the lookups that find nothing, too.
    """
    rest, saved = cell.rest, cell.saved.value
    varied = any(figure.source != "prior" for figure in (cell.departure, cell.break_even))
    if cell.fetch is None or rest is None or saved is None or not varied:  # at one RTT its effect is not known
        return None
    size = cell.reference_matched * cell.bytes_per_token
    rtts = np.geomspace(low, high, CURVE_POINTS).tolist()
    remote = [
        rest + cell.fetch.seconds(rtt, size) + (cell.lookup.seconds(rtt, size) if cell.lookup else 0.0) for rtt in rtts
    ]
    return {
        "source": "projected",
        "rtt": rtts,
        "remote": remote,
        "recompute": [rest + saved] * len(rtts),
    }


def _median(values: list[float]) -> float | None:
    middle = float(np.median(values)) if values else math.nan
    return None if math.isnan(middle) else middle
