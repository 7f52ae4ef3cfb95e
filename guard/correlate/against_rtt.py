"""TTFT against RTT as it was measured: one point per road and band of RTT, for the picture (pure)."""

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from guard import semconv
from guard.wire import RequestRecord

BANDS_PER_DECADE: Final = 6
LEAST: Final = 5
"""Fewest requests that make a point: quartiles of less say nothing."""

ROADS: Final = {
    semconv.DECISION_REMOTE: "remote",
    semconv.DECISION_DECLINE: "recompute",
    semconv.DECISION_SKIP: "recompute",
}
"""Requests with nothing to load (`none`) or another tier are on neither road."""


NEAR_NS: Final = 10 * 10**9
"""A request of which no RTT is known counts at that of the last read before it, if that is no older."""


def rtt_of(record: RequestRecord) -> float | None:
    """Idle RTT of the request in seconds; where no probe told, what its first fetch saw."""
    if record.rtt is not None:
        return record.rtt
    return next((fetch.network_rtt for fetch in record.fetches if fetch.network_rtt is not None), None)


def against_rtt(records: Iterable[RequestRecord]) -> dict[str, list[dict[str, Any]]]:
    """Median RTT, quartiles of TTFT and n per band of RTT, by road, of the requests of one backend. Seconds."""
    groups: dict[str, dict[int, list[tuple[float, float]]]] = {"remote": {}, "recompute": {}}
    last, at = None, 0
    for record in sorted(records, key=lambda record: record.arrival_ns):
        road, rtt = ROADS.get(record.decision), rtt_of(record)
        if rtt is not None:
            last, at = rtt, record.arrival_ns
        elif record.arrival_ns - at <= NEAR_NS:
            rtt = last
        if road and rtt and record.ttft is not None and not (record.aborted or record.handoff):
            band = math.floor(math.log10(rtt) * BANDS_PER_DECADE)
            groups[road].setdefault(band, []).append((rtt, record.ttft))
    return {
        road: [_point(bands[band]) for band in sorted(bands) if len(bands[band]) >= LEAST]
        for road, bands in groups.items()
    }


def _point(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    rtt, ttft = np.array(pairs).T
    low, middle, high = np.quantile(ttft, (0.25, 0.5, 0.75))
    return {
        "rtt": float(np.median(rtt)),
        "ttft": {"p25": float(low), "p50": float(middle), "p75": float(high)},
        "n": len(pairs),
    }
