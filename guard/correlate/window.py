"""The last requests, in memory: bounded by number and by age, found by any of their ids."""

from collections.abc import Iterable, Iterator, Sequence
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


class Window:
    """Records in the order in which they were given out; those that are too many or too old drop off the front."""

    def __init__(self, max_records: int = 50_000, max_seconds: float = 600.0) -> None:
        self._max_records = max_records
        self.seconds = max_seconds
        self._records: dict[str, tuple[int, RequestRecord]] = {}  # by span id
        self._by_id: dict[str, dict[str, RequestRecord]] = {}  # any id -> span id -> record

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return (record for _, record in self._records.values())

    def add(self, record: RequestRecord, now_ns: int | None = None) -> None:
        """Takes a new record. Its age counts from `now_ns`, or else from its first token."""
        if record.span_id in self._records:
            self.amend(record)
            return
        if now_ns is None:
            now_ns = record.arrival_ns + int((record.ttft or 0.0) * 1e9)
        self._records[record.span_id] = (now_ns, record)
        self._index(record)
        while len(self._records) > self._max_records:
            self._drop_oldest()

    def amend(self, record: RequestRecord) -> bool:
        """Puts a changed record in the place of the one with its span id; False where that has dropped off."""
        held = self._records.get(record.span_id)
        if held is None:
            return False
        if held[1] is not record:
            self._unindex(held[1])
            self._records[record.span_id] = (held[0], record)
            self._index(record)
        return True

    def expire(self, now_ns: int) -> None:
        """Drops what is older than the window is long."""
        oldest_ns = now_ns - int(self.seconds * 1e9)
        while self._records and next(iter(self._records.values()))[0] < oldest_ns:
            self._drop_oldest()

    def find(self, any_id: str) -> list[RequestRecord]:
        """The records with this request id, internal id or trace id, oldest first; a request with n > 1 has several."""
        return list(self._by_id.get(any_id, {}).values())

    def select(
        self,
        *,
        model: str | None = None,
        engine: str | None = None,
        backend: str | None = None,
        class_: str | None = None,
        since_ns: int | None = None,
    ) -> Iterator[RequestRecord]:
        """The records that match every filter that is given; `since_ns` is about their arrival."""
        for record in self:
            if (
                (model is None or record.model == model)
                and (engine is None or record.engine_id == engine)
                and (backend is None or record.backend == backend)
                and (class_ is None or record.class_ == class_)
                and (since_ns is None or record.arrival_ns >= since_ns)
            ):
                yield record

    def frame(self, records: Iterable[RequestRecord] | None = None) -> pl.DataFrame:
        """The records (all, or those given) as a table with the columns of `SCHEMA`."""
        return frame(self if records is None else records)

    def _index(self, record: RequestRecord) -> None:
        for key in {record.internal_id, record.request_id, record.trace_id} - {""}:
            self._by_id.setdefault(key, {})[record.span_id] = record

    def _unindex(self, record: RequestRecord) -> None:
        for key in {record.internal_id, record.request_id, record.trace_id} - {""}:
            held = self._by_id.get(key)
            if held is not None:
                held.pop(record.span_id, None)
                if not held:
                    del self._by_id[key]

    def _drop_oldest(self) -> None:
        _, record = self._records.pop(next(iter(self._records)))
        self._unindex(record)


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
