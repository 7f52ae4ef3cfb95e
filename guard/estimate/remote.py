"""What lookups and fetches cost: u and f as linear functions of RTT, size and what is in flight, robustly fitted.

Size is in units of the mean hit, so that coefficients are seconds of the reference request. Where a backend reports
its serial round trips k, RTT enters as k*RTT, else as RTT and size*RTT. A connector may read the store in its lookup
(LMCacheMP prefetches) or in its fetch: both are fitted alike, and what counts is their sum.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from guard.estimate.blocks import Blocks
from guard.estimate.linear import Fit, fit
from guard.estimate.samples import Array
from guard.estimate.shapes import FEW

_VARIES: Final = 0.02
"""Least coefficient of variation of a regressor that can carry a coefficient."""

_TOLD: Final = 0.8
"""Share of rows that must report round trips for k to be used."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds = t0 + size_cost*b + (trips + trips_size*b)*RTT + flight*g, b in mean hits, g other reads in flight."""

    t0: float
    size_cost: float
    trips: float
    trips_size: float
    flight: float
    spread: float
    n: int
    fit: Fit
    columns: tuple[str, ...]

    def seconds(self, rtt: Array | float, size: Array | float, flight: Array | float = 0.0) -> Array | float:
        """Median time."""
        trips = self.trips + self.trips_size * size
        return self.t0 + self.size_cost * size + trips * rtt + self.flight * flight

    @property
    def mean_factor(self) -> float:
        """Mean over median of lognormal noise."""
        return math.exp(0.5 * min(self.spread, 2.0) ** 2)

    def line(self, size: float, flight: float) -> tuple[float, float, Array]:
        """Level and slope over RTT at a size (medians), and their covariance (2, 2)."""
        level = self.t0 + self.size_cost * size + self.flight * flight
        slope = self.trips + self.trips_size * size
        at = {"one": (1.0, 0.0), "size": (size, 0.0), "rtt": (0.0, 1.0), "rtt_size": (0.0, size), "flight": (flight, 0)}
        rows = np.array([at[name] for name in self.columns], dtype=np.float64)
        return level, slope, self.fit.covariance(rows.T)


def fit_cost(
    y: Array, rtt: Array, size: Array, flight: Array, trips: Array, weights: Array, blocks: Blocks, *, varies: bool
) -> Cost:
    """Fits times y over rows whose block ids are `blocks`; `varies`: RTT does, so that it can carry a coefficient.

    `trips` holds reported round trips, NaN where there are none.
    """
    n = y.size
    columns: dict[str, Array] = {"one": np.ones(n)}
    if n >= FEW:
        sizes = _varies(size)
        if sizes:
            columns["size"] = size
        if varies:
            known = np.isfinite(trips)
            if np.count_nonzero(known) >= _TOLD * n:
                level, slope = _trips_by_size(trips[known], size[known])
                columns["rtt"] = np.where(known, trips, level + slope * size) * rtt
            else:
                columns["rtt"] = rtt
                if sizes:
                    columns["rtt_size"] = size * rtt
        if _varies(flight):
            columns["flight"] = flight
    names = tuple(columns)
    result = fit(np.stack(list(columns.values())), y, weights, blocks)
    beta = dict(zip(names, map(float, result.beta), strict=True))
    trips_level, trips_size = beta.get("rtt", 0.0), beta.get("rtt_size", 0.0)
    if "rtt" in columns and columns["rtt"] is not rtt:  # beta is per reported round trip: back to per request
        trips_level, trips_size = trips_level * level, trips_level * slope
        scale = np.array([level + slope if name == "rtt" else 1.0 for name in names])
        result = result.scaled(scale)
    return Cost(
        beta["one"], beta.get("size", 0.0), trips_level, trips_size, beta.get("flight", 0.0), result.spread, n, result,
        names,
    )  # fmt: skip


def _varies(values: Array) -> bool:
    mean = float(values.mean())
    apart = values - mean
    return mean > 0.0 and float(apart @ apart) > (_VARIES * mean) ** 2 * values.size


def _trips_by_size(trips: Array, size: Array) -> tuple[float, float]:
    """Trips = level + slope*size by least squares, both >= 0."""
    spread = size - size.mean()
    total = float(spread @ spread)
    slope = max(float(spread @ trips) / total, 0.0) if total > 1e-9 * size.size else 0.0
    level = float(trips.mean()) - slope * float(size.mean())
    if level < 0.0:
        return 0.0, float(trips @ size) / float(size @ size)
    return level, slope
