"""By how much TTFT moves per second of miss latency, with prompt length and load held still.

    direct   TTFT ~ miss latency + prompt + prompt^2 + computed + running + waiting + waits before and after the read
    total    TTFT ~ miss latency + prompt + prompt^2 + computed

Load raises both miss latency and TTFT, so it must be held still; but slow reads also make queues, and holding these
still takes that part of the effect away. So there are two numbers, and the truth about "what would TTFT be" lies in
`total` where reads cause the load, in `direct` where the load causes slow reads. Standard errors count blocks of time.
"""

from typing import Any, Final

import numpy as np
import polars as pl

from guard.correlate.stats import MIN_CORRELATION, Array

BLOCKS: Final = 24
_OUTER: Final = 0.005  # of TTFT on either side is left out: warm-up


def effects(rows: pl.DataFrame) -> dict[str, Any]:
    """Direct and total effect with 95 % intervals over requests that looked up; a note where the data do not tell."""
    n = rows.height
    if n < 2 * MIN_CORRELATION:
        return {
            "n": n,
            "direct": None,
            "total": None,
            "note": f"insufficient-data: {n} of {2 * MIN_CORRELATION} requests",
        }
    rows = rows.sort("arrival_ns")
    ttft, miss = _column(rows, "ttft"), _column(rows, "miss_latency")
    low, high = np.quantile(ttft, (_OUTER, 1.0 - _OUTER))
    inside = (ttft >= low) & (ttft <= high)
    rows, ttft, miss = rows.filter(pl.Series(inside)), ttft[inside], miss[inside]
    if np.ptp(miss) <= 1e-9:
        return {"n": n, "direct": None, "total": None, "note": "insufficient-data: no variation"}
    prompt = _column(rows, "prompt_tokens")
    size = [prompt, np.square(prompt), _column(rows, "tokens_computed")]
    waits = [sum(_column(rows, name) for name in ("intake", "queue")), _column(rows, "resume")]
    load = [_column(rows, "running"), _column(rows, "waiting"), *waits]
    return {"n": n, "direct": _slope(ttft, miss, [*size, *load]), "total": _slope(ttft, miss, size), "note": ""}


def _slope(y: Array, x: Array, controls: list[Any]) -> dict[str, float] | None:
    """Coefficient of x beside the controls (Frisch and Waugh: of what the controls leave of both)."""
    columns = [np.ones_like(y)]
    columns += [(one - one.mean()) / one.std() for one in controls if one.std() > 1e-12 * (abs(one.mean()) + 1.0)]
    q, r = np.linalg.qr(np.column_stack(columns))
    q = q[:, np.abs(np.diag(r)) > 1e-8 * abs(r[0, 0])]
    rest_y, rest_x = y - q @ (q.T @ y), x - q @ (q.T @ x)
    total = float(rest_x @ rest_x)
    if total <= 1e-6 * float(np.square(x - x.mean()).sum()):
        return None  # the controls say all that miss latency says
    value = float(rest_x @ rest_y) / total
    score = rest_x * (rest_y - value * rest_x)
    sums = np.array([part.sum() for part in np.array_split(score, min(BLOCKS, y.size))])
    pairs = float(sums[1:] @ sums[:-1]) / max(float(sums @ sums), 1e-300)
    inflation = (1.0 + min(max(pairs, 0.0), 0.9)) / (1.0 - min(max(pairs, 0.0), 0.9))
    error = 2.07 * float(np.sqrt(sums @ sums * inflation * sums.size / (sums.size - 1))) / total  # t, 23 degrees
    return {"value": value, "low": value - error, "high": value + error}


def _column(rows: pl.DataFrame, name: str) -> Array:
    return rows[name].fill_null(0).to_numpy().astype(np.float64, copy=False)
