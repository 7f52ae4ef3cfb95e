"""Finds requests that waited for one and the same load, and says whose it was.

Two kinds. A synchronous connector loads for its whole batch: the fetches of a step share a batch id, and every member
waits for all of it. And a convoy: several requests want the same prefix while one load of it is under way; their reads
begin at different times and end at the same moment. The wait of each member counts for the shared load; the time of
the load itself counts once.
"""

from typing import Any, Final

import numpy as np
import polars as pl

LEAST: Final = 3
"""Requests that make a convoy; two that end together may do so by chance."""

TOGETHER: Final = 2e-3
"""Ends so close, seconds, are one moment: about a step of the engine's loop..."""

SHARE: Final = 0.02
"""...or this share of the longest wait, where that is more."""

SHOWN: Final = 20


def convoys(rows: pl.DataFrame) -> dict[str, Any]:
    """Shared loads of the frame's requests: the largest, and their share of all TTFT. Times in seconds."""
    loads = rows.filter((pl.col("fetch") > 0.0) & (pl.col("tokens_loaded") > 0)).with_columns(
        wait=pl.col("lookup") + pl.col("slot") + pl.col("fetch"),
        start=pl.col("arrival_ns") / 1e9 + pl.col("intake") + pl.col("queue"),
    )
    found = [*_batches(loads), *_ends_together(loads.filter(pl.col("batch").is_null()))]
    found.sort(key=lambda one: one["shared_wait_seconds"], reverse=True)
    ttft = float(rows["ttft"].sum() or 0.0)
    waited = sum(one["shared_wait_seconds"] for one in found)
    return {
        "n": sum(one["requests"] for one in found),
        "loads": len(found),
        "shared_wait_seconds": waited,
        "share_of_ttft": waited / ttft if ttft > 0.0 else None,
        "largest": found[:SHOWN],
        "source": "measured",
    }


def _batches(loads: pl.DataFrame) -> list[dict[str, Any]]:
    groups = loads.filter(pl.col("batch").is_not_null()).partition_by("engine_id", "batch")
    return [_convoy("batch", group, float(group["fetch"].to_numpy().max())) for group in groups if group.height > 1]


def _ends_together(loads: pl.DataFrame) -> list[dict[str, Any]]:
    found = []
    for group in loads.partition_by("engine_id"):
        ended = group.with_columns(end=pl.col("start") + pl.col("wait")).sort("end")
        end, start, wait = (ended[name].to_numpy() for name in ("end", "start", "wait"))
        first = 0
        for index in range(1, end.size + 1):
            limit = max(TOGETHER, SHARE * float(wait[first:index].max()))
            if index < end.size and end[index] - end[first] <= limit:
                continue
            members = slice(first, index)
            # Together at the end but not at the beginning: else they are a burst whose reads take equally long.
            apart = float(np.ptp(start[members])) > 2.0 * limit
            waited = float(wait[members].min()) > limit
            if index - first >= LEAST and apart and waited:
                found.append(_convoy("convoy", ended[first:index], float(wait[members].max())))
            first = index
    return found


def _convoy(kind: str, group: pl.DataFrame, load: float) -> dict[str, Any]:
    """`leader` began first: the load is taken for its own; `shared_wait_seconds` is what all members waited for it."""
    leader = group.sort("start").row(0, named=True)
    return {
        "kind": kind,
        "engine_id": leader["engine_id"],
        "backend": leader["backend"],
        "leader": leader["internal_id"],
        "requests": group.height,
        "load_seconds": load,
        "shared_wait_seconds": float(group["fetch" if kind == "batch" else "wait"].sum()),
        "members": group["internal_id"].to_list()[:50],
    }
