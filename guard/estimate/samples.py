"""The samples of one cell as columns of numbers, taken record by record into a ring of fixed size."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from guard import semconv as s
from guard.wire import RequestRecord

Array = npt.NDArray[Any]
"""Numbers, mostly float64."""

Mask = npt.NDArray[np.bool_]

REMOTE: Final = 1.0
DECLINE: Final = 2.0
SKIP: Final = 3.0
NONE: Final = 0.0
OTHER_TIER: Final = 4.0
ROADS: Final = {
    s.DECISION_NONE: NONE, s.DECISION_REMOTE: REMOTE, s.DECISION_DECLINE: DECLINE, s.DECISION_SKIP: SKIP,
    s.DECISION_OTHER_TIER: OTHER_TIER,
}  # fmt: skip

COLUMNS: Final = (
    "at", "id", "engine", "batch", "road", "prompt", "local", "matched", "loaded", "computed", "running", "failed",
    "ttft", "before", "lookup", "slot", "fetch", "resume", "prefill", "rtt", "trips_lookup", "trips_fetch", "inflight",
    "bytes", "e2e",
)  # fmt: skip
"""Seconds, tokens, bytes; NaN: not known. `before` is intake + queue, `at` a clock that only goes forward."""
_AT: Final = {name: index for index, name in enumerate(COLUMNS)}
_MUST: Final = [_AT[name] for name in ("ttft", "before", "lookup", "slot", "fetch", "resume", "prefill")]
_HASH: Final = (1 << 52) - 1
LONGEST_GAP: Final = 60.0
"""Time between two samples counts at most so much: a step of a clock ages nothing by more."""

CAPACITY: Final = 4096


class Samples:
    """Columns by name; rows in the order in which they came. A choice of rows copies a column when it is asked for."""

    __slots__ = ("_columns", "_index", "data")

    def __init__(self, data: Array, index: npt.NDArray[np.intp] | None = None) -> None:
        self.data = data
        self._index = index
        self._columns: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if self._index is None:
            whole: Array = self.data[_AT[name]]
            return whole
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self.data[_AT[name]].take(self._index)
        return column

    def __len__(self) -> int:
        return int(self.data.shape[1] if self._index is None else self._index.size)

    def rows(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Samples":
        """The rows of a mask or of indices."""
        index = (np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen).astype(np.intp, copy=False)
        return Samples(self.data, index if self._index is None else self._index[index])


class Ring:
    """The last `CAPACITY` samples of one cell; a row takes about a microsecond and 200 bytes."""

    __slots__ = ("_arrived", "_data", "_next", "count")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._data = np.full((len(COLUMNS), 64), np.nan)
        self._next = 0
        self._arrived: float | None = None
        self.count = capacity

    def extend(self, rows: Sequence[tuple[float, ...]]) -> None:
        """Takes rows of `row_of`, no id twice; one with the id of a row that is held takes its place."""
        new = np.array(rows, dtype=np.float64).T
        _, held, again = np.intersect1d(self._data[1, : self._filled()], new[1], return_indices=True)
        self._data[1:, held] = new[1:, again]  # each keeps its time
        self._append(np.delete(new, again, axis=1))

    def _append(self, new: Array) -> None:
        number = new.shape[1]
        if not number:
            return
        size = self._data.shape[1]
        last = self._data[0, (self._next - 1) % size] if self._next else 0.0
        gaps = np.diff(new[0], prepend=new[0, 0] if self._arrived is None else self._arrived)
        self._arrived = float(new[0, -1])
        new[0] = last + np.cumsum(gaps.clip(0.0, LONGEST_GAP))
        if size < min(self._next + number, self.count):
            grown = np.full((len(COLUMNS), min(self.count, max(size * 4, self._next + number))), np.nan)
            grown[:, : self._next] = self._data[:, : self._next]
            self._data, size = grown, grown.shape[1]
        new = new[:, -size:]
        self._next += number
        self._data[:, np.arange(self._next - new.shape[1], self._next) % size] = new

    def samples(self) -> Samples:
        """A copy of the rows, oldest first."""
        filled = self._filled()
        start = self._next % filled if filled else 0
        return Samples(np.concatenate((self._data[:, start:filled], self._data[:, :start]), axis=1))

    def _filled(self) -> int:
        return min(self._next, self._data.shape[1])


def row_of(record: RequestRecord) -> tuple[float, ...] | None:
    """A record as a row; None where it tells nothing: aborted, handed off, clamped, or with a time that is no time."""
    ttft = record.ttft
    if ttft is None or record.aborted or record.handoff or record.clamped:
        return None
    parts = (
        record.intake + record.queue, record.lookup, record.slot, record.fetch, record.resume, record.prefill,
    )  # fmt: skip
    if not (0.0 < ttft < math.inf and all(0.0 <= part < math.inf for part in parts)):
        return None
    rtt, inflight, batch = record.rtt, math.nan, ""
    size, failed, trips = 0, 0, 0
    told = bool(record.fetches)
    for fetch in record.fetches:
        if rtt is None:
            rtt = fetch.network_rtt
        size += fetch.bytes
        failed += fetch.outcome == s.OUTCOME_FAILED
        told = told and fetch.round_trips is not None
        trips += fetch.round_trips or 0
        batch = fetch.batch or ""
    if record.fetches:
        inflight = record.fetches[0].inflight
    return (
        record.arrival_ns / 1e9, float(hash(record.span_id) & _HASH), float(hash(record.engine_id) & _HASH),
        float(hash(batch) & _HASH) if batch else 0.0, ROADS.get(record.decision, OTHER_TIER),
        record.prompt_tokens, record.tokens_local, record.tokens_matched, record.tokens_loaded, record.tokens_computed,
        record.running, failed, ttft, *parts, _positive(rtt), _positive(record.lookup_round_trips),
        _positive(trips) if told else math.nan, inflight, size,
        record.vllm_e2e if record.vllm_e2e is not None else _end_to_end(record),
    )  # fmt: skip


def clean(samples: Samples) -> Samples:
    """The rows whose times are times: finite, none negative, TTFT above 0. RTT and counts out of range become NaN."""
    times = samples.data[_MUST]
    good = np.isfinite(times).all(axis=0) & (times >= 0.0).all(axis=0) & (times[0] > 0.0)
    kept = samples if good.all() else Samples(np.ascontiguousarray(samples.data[:, good]))
    for name in ("rtt", "trips_lookup", "trips_fetch"):
        column = kept[name]
        with np.errstate(invalid="ignore"):
            column[~(column > 0.0) | ~(column < np.inf)] = np.nan
    return kept


def pooled(parts: list[Samples], capacity: int = CAPACITY) -> Samples:
    """Samples of several classes as one, in time; thinned evenly to `capacity`."""
    total = sum(map(len, parts))
    step = -(-total // capacity) if total else 1
    data = np.concatenate([part.data[:, ::step] for part in parts], axis=1)
    return Samples(data, np.argsort(data[0], kind="stable")) if len(parts) > 1 else Samples(data)


def _positive(value: float | None) -> float:
    return value if value is not None and 0.0 < value < math.inf else math.nan


def _end_to_end(record: RequestRecord) -> float:
    if record.tpot is None or record.output_tokens is None or record.ttft is None:
        return math.nan
    return record.ttft + record.tpot * (record.output_tokens - 1)
