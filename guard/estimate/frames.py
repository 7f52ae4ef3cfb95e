"""Estimates from a window's frame (`guard.correlate.frame.SCHEMA`)."""

from collections.abc import Iterator

import numpy as np
import polars as pl

from guard.estimate.cell import HALF_LIFE
from guard.estimate.cells import fit_samples
from guard.estimate.samples import COLUMNS, LONGEST_GAP, OTHER_TIER, ROADS, Samples, clean
from guard.estimate.shapes import Cell


def fit(frame: pl.DataFrame, *, half_life: float = HALF_LIFE, simulated: bool = False) -> list[Cell]:
    """Cells of a window's frame: per model and backend the pool, then its classes.

    Hand-offs, aborted, clamped and (unless asked for) simulated requests are left out, duplicates count once.
    """
    return fit_samples(of_frame(frame, simulated=simulated), half_life=half_life)


def of_frame(frame: pl.DataFrame, *, simulated: bool = False) -> Iterator[tuple[str, str, str, Samples]]:
    """Model, backend, class and samples of every cell of a window's frame; duplicated records count once."""
    rows = (
        frame.filter(~pl.col("aborted") & ~pl.col("handoff") & ~pl.col("clamped") & pl.col("ttft").is_not_null())
        .filter(pl.lit(simulated) | ~pl.col("simulated"))
        .unique(("engine_id", "internal_id", "arrival_ns"), keep="last", maintain_order=True)
    )
    gap = (pl.col("arrival_ns").diff() / 1e9).clip(0.0, LONGEST_GAP).fill_null(0.0)
    tpot_end = pl.col("ttft") + pl.col("tpot") * (pl.col("output_tokens") - 1)
    rows = rows.select(
        "model", "backend", "class",
        at=gap.cum_sum(), id=pl.int_range(pl.len()).cast(pl.Float64),
        engine=_code("engine_id"), batch=pl.when(pl.col("batch").is_null()).then(0.0).otherwise(_code("batch") + 1.0),
        road=pl.col("decision").replace_strict(ROADS, default=OTHER_TIER, return_dtype=pl.Float64),
        prompt="prompt_tokens", local="tokens_local", matched="tokens_matched", loaded="tokens_loaded",
        computed="tokens_computed", running="running", failed="failed", ttft="ttft",
        before=pl.col("intake") + pl.col("queue"), lookup="lookup", slot="slot", fetch="fetch", resume="resume",
        prefill="prefill", rtt="rtt", trips_lookup="lookup_round_trips", trips_fetch="round_trips",
        inflight="inflight", bytes="fetch_bytes", e2e=pl.coalesce("vllm_e2e", tpot_end),
    )  # fmt: skip
    for key, group in sorted(rows.partition_by("model", "backend", "class", as_dict=True).items()):
        data = group.select(pl.col(COLUMNS).cast(pl.Float64).fill_null(np.nan)).to_numpy().T
        yield key[0], key[1], key[2], clean(Samples(np.ascontiguousarray(data)))


def _code(name: str) -> pl.Expr:
    return pl.col(name).rank("dense").cast(pl.Float64)
