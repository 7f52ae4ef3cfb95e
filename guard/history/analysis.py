"""Questions to the history of requests: what got slower between two days, the slowest, what hits were worth.

Figures are measured unless they say `projected`. Intervals are 95 %: noise is autocorrelated, so the unit is not the
request but the block of `BLOCK_SECONDS`; each block gives one value, and Student's t over the blocks the interval.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from guard.classes import CONCURRENCY_BANDS, PROMPT_BANDS
from guard.correlate.frame import SCHEMA
from guard.errors import KVGuardError

BLOCK_SECONDS: Final = 600
MIN_PER_BLOCK: Final = 20
"""A block with fewer requests says too little to count."""

MIN_BLOCKS: Final = 8
MARGIN: Final = 0.05
"""A change is told where its whole interval is beyond this."""

_MEASURES: Final = {"ttft_p50": ("ttft", 0.5), "ttft_p95": ("ttft", 0.95), "miss_latency_p50": ("miss_latency", 0.5)}
_KEYS: Final = ("model", "backend", "class", "decision")
_DAY_NS: Final = 86_400 * 10**9
_PLACES: Final = "/**/*.parquet"


class HistoryError(KVGuardError):
    """There is no history that can be read where it was looked for."""


def scan(place: str) -> pl.LazyFrame:
    """The requests under a directory, a file, a pattern or a URL that polars reads (`s3://bucket/kvguard`)."""
    source = place if place.endswith(".parquet") else place.rstrip("/") + _PLACES
    return pl.scan_parquet(
        source, schema=SCHEMA, missing_columns="insert", extra_columns="ignore", hive_partitioning=False
    )


def days(requests: pl.LazyFrame, place: str) -> list[tuple[str, int]]:
    """The days (UTC) with requests, oldest first, and how many there are.

    Raises:
        HistoryError: there are none, or they cannot be read.
    """
    try:
        found = requests.select((pl.col("arrival_ns") // _DAY_NS).alias("day").value_counts()).unnest("day")
        rows = found.sort("day").collect(engine="streaming").rows()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise HistoryError(f"{place}: {str(error).splitlines()[0]}") from None
    if not rows:
        raise HistoryError(f"{place}: holds no requests")
    return [(str(np.datetime64(day, "D")), count) for day, count in rows]


def regressions(requests: pl.LazyFrame, before: str, after: str) -> list[dict[str, Any]]:
    """For each model, backend, class and road: how its TTFT and miss latency changed from one day (UTC) to another.

    `ratio` is after / before of the geometric mean over blocks, with its interval by Welch. `verdict` is `slower`,
    `faster`, `same` (the interval holds no change beyond the margin that is sure), or `insufficient-data`.
    """
    blocks = pl.concat([_blocks(requests, _day(one)).with_columns(day=pl.lit(one)) for one in (before, after)])
    found = []
    for key, group in blocks.group_by(*_KEYS):
        sides = [group.filter(pl.col("day") == one) for one in (before, after)]
        counts = {"n_before": _sum(sides[0]), "n_after": _sum(sides[1]), "source": "measured"}
        for name in _MEASURES:
            old, new = (side[name].to_numpy() for side in sides)
            if (old > 0).all() and (new > 0).all():  # a road without a remote part has no miss latency
                found.append({**dict(zip(_KEYS, key, strict=True)), "measure": name, **_change(old, new), **counts})
    order = {"slower": 0, "faster": 1, "same": 2, "insufficient-data": 3}
    return sorted(
        found, key=lambda row: (order[row["verdict"]], -(row["ratio"] or 0.0), *(row[name] for name in _KEYS))
    )


def slowest(requests: pl.LazyFrame, limit: int) -> list[dict[str, Any]]:
    """The requests with the longest TTFT, and where it went."""
    columns = (
        "request_id", "trace_id", "engine_id", "model", "backend", "class", "decision", "reason", "ttft", "queue",
        "lookup", "slot", "fetch", "prefill", "failed", "arrival_ns",
    )  # fmt: skip
    top = requests.filter(_SERVED).select(columns).top_k(limit, by="ttft").collect(engine="streaming")
    rows = top.sort("ttft", descending=True).to_dicts()
    return [
        {**row, "arrival": str(np.datetime64(row.pop("arrival_ns"), "ns")) + "Z", "source": "measured"} for row in rows
    ]


def hit_value(requests: pl.LazyFrame) -> list[dict[str, Any]]:
    """What remote hits were worth by the length of the prefix that was loaded: seconds of TTFT saved per request.

    value = prefill without the hit - prefill as it was - exposed wait. The first is `projected`: the median prefill of
    requests on the same concurrency band that loaded nothing, by tokens computed, interpolated. Hits of a length that
    no such request computed are left out and counted (`outside`).
    """
    baseline = _baseline(requests)
    lookup, block = pl.col("tokens_loaded").cast(pl.Int32), (pl.col("arrival_ns") // (BLOCK_SECONDS * 10**9))
    hits = (
        requests.filter(_SERVED, ~pl.col("handoff"), pl.col("decision") == "remote", pl.col("tokens_loaded") > 0)
        .select(
            lookup.alias("loaded"), block.cast(pl.Int32).alias("block"), _CONCURRENCY.alias("running"),
            (pl.col("prompt_tokens") - pl.col("tokens_local")).cast(pl.Int32).alias("alone"),
            (pl.col("prefill") + pl.col("exposed_wait")).alias("spent"), "exposed_wait",
        )
        .collect(engine="streaming")
    )  # fmt: skip
    projected = np.full(hits.height, np.nan)
    running, alone = hits["running"].to_numpy(), hits["alone"].to_numpy()
    for band, (tokens, seconds) in baseline.items():
        chosen = running == band
        inside = chosen & (alone >= tokens[0]) & (alone <= tokens[-1])
        projected[inside] = np.interp(alone[inside], tokens, seconds)
    table = hits.select(
        _band(pl.col("loaded")).alias("band"), "block", "exposed_wait",
        (pl.Series("projected", projected) - pl.col("spent")).fill_nan(None).alias("value"),
    )  # fmt: skip
    blocks = table.group_by("band", "block").agg(
        pl.col("value").mean(), pl.col("value").count().alias("n"), (pl.col("value") > 0).sum().alias("won"),
        pl.col("value").is_null().sum().alias("outside"), pl.col("exposed_wait").median(),
        pl.col("value").sum().alias("sum"),
    )  # fmt: skip
    rows = []
    for (band,), group in sorted(blocks.group_by("band"), key=lambda item: item[0]):
        full = group.filter(pl.col("n") >= MIN_PER_BLOCK)
        n = _sum(group)
        rows.append({
            "prefix": PROMPT_BANDS[int(str(band))],
            "n": n,
            "outside": _sum(group, "outside"),
            **dict(zip(("value_seconds", "low", "high"), _mean(full["value"].to_numpy()), strict=True)),
            "share_won": _sum(group, "won") / n if n else None,
            "exposed_wait_seconds": float(np.median(group["exposed_wait"].to_numpy())),
            "total_seconds": float(group["sum"].sum()),
            "source": "projected",
        })  # fmt: skip
    return rows


_SERVED: Final = pl.col("ttft").is_not_null() & ~pl.col("aborted") & (pl.col("ttft") > 0)
_CONCURRENCY: Final = (
    pl.when(pl.col("running") <= 4).then(0).when(pl.col("running") <= 16).then(1).when(pl.col("running") <= 64).then(2)
    .otherwise(3).cast(pl.Int8)
)  # fmt: skip
"""Index of the concurrency band, as `guard.classes.class_of` cuts them."""


def _blocks(requests: pl.LazyFrame, day: int) -> pl.DataFrame:
    """One row per key and block of a day with the measures; a day at a time, in narrow columns, for memory's sake."""
    return (
        requests.filter(_SERVED, pl.col("arrival_ns") // _DAY_NS == day)
        .select(
            *(pl.col(name).cast(pl.Categorical) for name in _KEYS),
            (pl.col("arrival_ns") // (BLOCK_SECONDS * 10**9)).cast(pl.Int32).alias("block"),
            pl.col("ttft", "miss_latency").cast(pl.Float32),
        )
        .group_by(*_KEYS, "block")
        .agg(pl.len().alias("n"), *(pl.col(column).quantile(q).alias(name) for name, (column, q) in _MEASURES.items()))
        .filter(pl.col("n") >= MIN_PER_BLOCK)
        .collect(engine="streaming")
    )


def _band(tokens: pl.Expr) -> pl.Expr:
    """Index of the prompt band, as `guard.classes.class_of` cuts them."""
    return pl.sum_horizontal([(tokens >= (512 << step)).cast(pl.Int8) for step in range(len(PROMPT_BANDS) - 1)])


def _baseline(requests: pl.LazyFrame) -> dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """By concurrency band: tokens computed and median prefill of requests that loaded nothing, in growing order."""
    computed = pl.col("tokens_computed")
    step = (computed.cast(pl.Float64).log(2) * 2).floor().cast(pl.Int32).alias("step")  # two points an octave
    rows = (
        requests.filter(_SERVED, ~pl.col("handoff"), pl.col("tokens_loaded") == 0, computed > 0)
        .group_by(_CONCURRENCY.alias("band"), step)
        .agg(computed.median().alias("tokens"), pl.col("prefill").median().alias("seconds"), pl.len().alias("n"))
        .filter(pl.col("n") >= MIN_PER_BLOCK)
        .sort("tokens")
        .collect(engine="streaming")
    )
    found = {}
    for band in range(len(CONCURRENCY_BANDS)):
        group = rows.filter(pl.col("band") == band)
        if group.height > 1:
            found[band] = (group["tokens"].to_numpy(), group["seconds"].to_numpy())
    return found


def _change(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> dict[str, Any]:
    values = {"before_seconds": _geometric(old), "after_seconds": _geometric(new)}
    nothing = {"ratio": None, "low": None, "high": None, "verdict": "insufficient-data"}
    if min(len(old), len(new)) < MIN_BLOCKS:
        return {**values, **nothing, "blocks": min(len(old), len(new))}
    logs = np.log(old), np.log(new)
    parts = [float(side.var(ddof=1)) / len(side) for side in logs]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / max(
        sum(part**2 / (len(side) - 1) for part, side in zip(parts, logs, strict=True)), 1e-300
    )
    middle, reach = float(logs[1].mean() - logs[0].mean()), error * _student(max(freedom, 1.0))
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    verdict = "slower" if low > 1 + MARGIN else "faster" if high < 1 / (1 + MARGIN) else "same"
    blocks = min(len(old), len(new))
    return {**values, "ratio": math.exp(middle), "low": low, "high": high, "verdict": verdict, "blocks": blocks}


def _mean(values: np.ndarray[Any, Any]) -> tuple[float | None, float | None, float | None]:
    """Mean over blocks and its interval; the ends are None with too few blocks."""
    if not len(values):
        return None, None, None
    middle = float(values.mean())
    if len(values) < MIN_BLOCKS:
        return middle, None, None
    reach = float(values.std(ddof=1)) / math.sqrt(len(values)) * _student(len(values) - 1.0)
    return middle, middle - reach, middle + reach


def _student(freedom: float) -> float:
    """The 97.5 % quantile of Student's t (Cornish-Fisher, Abramowitz & Stegun 26.7.5; within 0.5 % from 5 degrees)."""
    z = 1.959964
    terms: Iterable[float] = (
        z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )  # fmt: skip
    return sum(term / freedom**power for power, term in enumerate(terms))


def _geometric(values: Sequence[float] | np.ndarray[Any, Any]) -> float | None:
    return math.exp(float(np.log(values).mean())) if len(values) else None


def _sum(group: pl.DataFrame, column: str = "n") -> int:
    return int(group[column].sum())


def _day(text: str) -> int:
    return int(np.datetime64(text, "D").astype(int))
