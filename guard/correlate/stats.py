"""Quantiles and correlations that say when the data do not suffice."""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MIN_CORRELATION: Final = 30
"""Fewer pairs than this say too little: the 95 % interval of r = 0 is then wider than +-0.36."""


def summary(values: Array) -> dict[str, Any]:
    """Number, mean and quantiles; p95 needs 20 values and p99 a hundred, else they are None."""
    return {
        "n": int(values.size),
        "mean": float(values.mean()) if values.size else None,
        "p50": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "p99": quantile(values, 0.99),
    }


def quantile(values: Array, q: float) -> float | None:
    """The q-quantile, linear between order statistics; above the median it needs 1/(1-q) values, else it is None."""
    if values.size == 0 or (q > 0.5 and values.size < round(1.0 / (1.0 - q))):
        return None
    return float(np.quantile(values, q))


def correlation(x: Array, y: Array) -> dict[str, Any]:
    """Pearson and Spearman coefficients of pairs, each with its 95 % interval, or a note why not.

    Intervals by Fisher's z: standard error 1/sqrt(n - 3) for Pearson, 1.03/sqrt(n - 3) for Spearman (Fieller, Hartley
    and Pearson 1957). They hold for independent pairs; requests that share a queue are not, so read them as the least.
    """
    n = int(x.size)
    result: dict[str, Any] = dict.fromkeys(("pearson", "pearson_interval", "spearman", "spearman_interval"))
    if n < MIN_CORRELATION:
        return {"n": n, **result, "note": f"insufficient-data: {n} of {MIN_CORRELATION} requests"}
    if np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return {"n": n, **result, "note": "insufficient-data: no variation"}
    pearson, spearman = _pearson(x, y), _pearson(_ranks(x), _ranks(y))
    return {
        "n": n,
        "pearson": pearson,
        "pearson_interval": _interval(pearson, n, 1.0),
        "spearman": spearman,
        "spearman_interval": _interval(spearman, n, 1.03),
        "note": "",
    }


def _pearson(x: Array, y: Array) -> float:
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return max(-1.0, min(1.0, float(dx @ dy) / scale)) if scale > 0.0 else 0.0


def _ranks(values: Array) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts, dtype=np.float64)
    means: Array = ends - (counts + 1) / 2.0
    return means[inverse]


def _interval(r: float, n: int, factor: float) -> list[float]:
    z, error = math.atanh(max(-0.999999999, min(0.999999999, r))), 1.959964 * factor / math.sqrt(n - 3)
    return [min(r, math.tanh(z - error)), max(r, math.tanh(z + error))]
