"""Where TTFT goes: its parts per model, backend, class and road, and miss latency against TTFT."""

from typing import Any, Final

import numpy as np
import polars as pl

from guard.correlate.attribution_convoys import convoys
from guard.correlate.attribution_effects import effects
from guard.correlate.records import PARTS
from guard.correlate.stats import Array, correlation, quantile, summary

_BINS: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def report(frame: pl.DataFrame, window_seconds: float) -> dict[str, Any]:
    """The body of `GET /v1/correlation`, from the window's frame. Times in seconds.

    Requests aborted before a first token and hand-offs of a prefill/decode pair are counted and left out.
    """
    aborted = frame["ttft"].is_null() | frame["aborted"]
    handoff = frame["handoff"] & ~aborted
    rows = frame.filter(~aborted & ~handoff)
    looked_up = rows.filter(pl.col("lookup") > 0.0)
    return {
        "window_seconds": window_seconds,
        "n": rows.height,
        "excluded": {"aborted": int(aborted.sum()), "handoff": int(handoff.sum())},
        "simulated": int(rows["simulated"].sum()),
        "groups": [
            {**_named(("model", "backend", "class", "decision"), key), **decompose(group)}
            for key, group in _groups(rows, "model", "backend", "class", "decision")
        ],
        "correlation": [
            {**_named(("model", "backend", "class"), key), **miss_against_ttft(group), "effect": effects(group)}
            for key, group in _groups(looked_up, "model", "backend", "class")
        ],
        "convoys": convoys(rows),
        "residual": residual(rows),
        "source": "measured",
    }


def decompose(rows: pl.DataFrame) -> dict[str, Any]:
    """TTFT and its parts over requests that have one: distribution, and each part's share of the summed TTFT."""
    ttft = _column(rows, "ttft")
    total = float(ttft.sum())
    parts = {}
    for name in PARTS:
        values = _column(rows, name)
        parts[name] = {**_without_n(summary(values)), "share": float(values.sum()) / total if total > 0.0 else None}
    looked_up = rows.filter(pl.col("lookup") > 0.0)
    return {
        "n": rows.height,
        "ttft": _without_n(summary(ttft)),
        "parts": parts,
        "miss_latency": summary(_column(looked_up, "miss_latency")),
        "exposed_wait": summary(_column(looked_up, "exposed_wait")),
    }


def miss_against_ttft(rows: pl.DataFrame) -> dict[str, Any]:
    """How TTFT goes with miss latency over requests that looked up: coefficients, and TTFT per band of miss latency.

    A coefficient is no cause: load raises both. `effect` holds prompt length and load still.
    """
    miss, ttft = _column(rows, "miss_latency"), _column(rows, "ttft")
    result = correlation(miss, ttft)
    return {**result, "table": _table(miss, ttft) if result["pearson"] is not None else []}


def residual(rows: pl.DataFrame) -> dict[str, Any]:
    """What the parts leave of TTFT unexplained: |residual| in seconds and as a share of the request's TTFT."""
    known = rows.filter(pl.col("residual").is_not_null() & (pl.col("ttft") > 0.0))
    size = np.abs(_column(known, "residual"))
    basis = known.select(pl.coalesce("vllm_ttft", "ttft").alias("ttft"))
    share = size / np.maximum(_column(basis, "ttft"), 1e-9)
    return {**summary(size), "share_p50": quantile(share, 0.5), "share_p95": quantile(share, 0.95)}


def _table(miss: Array, ttft: Array) -> list[dict[str, Any]]:
    edges = np.unique(np.quantile(miss, _BINS))
    bins = np.clip(np.searchsorted(edges, miss, side="right") - 1, 0, edges.size - 2)
    table = []
    for index in range(edges.size - 1):
        inside = ttft[bins == index]
        table.append(
            {
                "miss_latency_from": float(edges[index]),
                "miss_latency_to": float(edges[index + 1]),
                **{f"ttft_{name}" if name != "n" else name: value for name, value in summary(inside).items()},
            }
        )
    return table


def _groups(rows: pl.DataFrame, *keys: str) -> list[tuple[tuple[Any, ...], pl.DataFrame]]:
    return sorted(rows.partition_by(*keys, as_dict=True).items()) if rows.height else []


def _named(names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def _column(rows: pl.DataFrame, name: str) -> Array:
    return rows[name].to_numpy().astype(np.float64, copy=False)


def _without_n(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "n"}
