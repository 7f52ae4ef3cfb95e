"""Requests as a table: what the analysis of a window and the history of requests are made from."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import polars as pl

from guard.semconv import OUTCOME_FAILED
from guard.wire import FetchRecord, RequestRecord

_TEXT: Final = ("internal_id", "request_id", "trace_id", "engine_id", "model", "backend", "decision", "reason")
_COUNTS: Final = (
    "arrival_ns", "prompt_tokens", "tokens_local", "tokens_matched", "tokens_loaded", "tokens_computed", "running",
    "waiting", "lookup_round_trips", "lookup_polls", "stores", "store_bytes", "output_tokens",
)  # fmt: skip
_SECONDS: Final = (
    "ttft", "intake", "queue", "lookup", "slot", "fetch", "resume", "prefill", "residual", "exposed_wait",
    "miss_latency", "vllm_ttft", "vllm_queue", "vllm_prefill", "vllm_e2e", "tpot", "rtt", "propensity",
)  # fmt: skip
_FLAGS: Final = ("aborted", "handoff", "simulated")

SCHEMA: Final = pl.Schema(
    {
        **dict.fromkeys(_TEXT, pl.String()),
        "class": pl.String(),
        **dict.fromkeys(_COUNTS, pl.Int64()),
        **dict.fromkeys(_SECONDS, pl.Float64()),
        **dict.fromkeys(_FLAGS, pl.Boolean()),
        "attempts": pl.Int64(),
        "failed": pl.Int64(),
        "fetch_bytes": pl.Int64(),
        "reads": pl.Int64(),
        "round_trips": pl.Int64(),  # of its fetches, where every one of them told
        "inflight": pl.Int64(),  # reads in flight when its first fetch began, this one counted
        "batch": pl.String(),  # of its last fetch: synchronous loads of one step share it and its time
        "clamped": pl.Boolean(),  # something was out of range as sent and was put right
    }
)
"""Columns of `frame`: a record's fields by name (`class_` as `class`), and sums over its fetches."""
_NAMES: Final = (*_TEXT, "class_", *_COUNTS, *_SECONDS, *_FLAGS, "fetches", "clamped")
_FIELDS: Final = attrgetter(*_NAMES)
_PIECE: Final = 512


def frame(records: Iterable[RequestRecord]) -> pl.DataFrame:
    """Records as a table with the columns of `SCHEMA`.

    Made piece by piece: each piece is a few calls into C that keep the interpreter to themselves, and on another thread
    than the event loop's a whole window of them would hold that up for hundreds of milliseconds.
    """
    rows = list(records)
    pieces = [_piece(rows[at : at + _PIECE]) for at in range(0, max(len(rows), 1), _PIECE)]
    return pieces[0] if len(pieces) == 1 else pl.concat(pieces, rechunk=True)


def _piece(rows: Sequence[RequestRecord]) -> pl.DataFrame:
    values = list(zip(*map(_FIELDS, rows), strict=True)) or [()] * len(_NAMES)
    columns = dict(zip(_NAMES, values, strict=True))
    fetches = columns.pop("fetches")
    columns["class"] = columns.pop("class_")
    columns["attempts"] = tuple(map(len, fetches))
    columns["failed"] = tuple(sum(one.outcome == OUTCOME_FAILED for one in held) for held in fetches)
    columns["fetch_bytes"] = tuple(sum(one.bytes for one in held) for held in fetches)
    columns["reads"] = tuple(sum(one.reads for one in held) for held in fetches)
    columns["round_trips"] = tuple(_told(held) for held in fetches)
    columns["inflight"] = tuple(held[0].inflight if held else None for held in fetches)
    columns["batch"] = tuple(held[-1].batch if held else None for held in fetches)
    columns["clamped"] = tuple(map(bool, columns["clamped"]))
    columns["rtt"] = tuple(map(_rtt, columns["rtt"], fetches))
    return pl.DataFrame({name: columns[name] for name in SCHEMA}, schema=SCHEMA)


def _rtt(probed: float | None, fetches: Sequence[FetchRecord]) -> float | None:
    """Idle RTT of the request: as probed, else as its first fetch saw it."""
    if probed is not None:
        return probed
    return next((one.network_rtt for one in fetches if one.network_rtt is not None), None)


def _told(fetches: Sequence[FetchRecord]) -> int | None:
    counts = [one.round_trips for one in fetches if one.round_trips is not None]
    return sum(counts) if fetches and len(counts) == len(fetches) else None
