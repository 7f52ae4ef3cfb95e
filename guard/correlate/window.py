"""The last requests, in memory: bounded by number and by age, found by any of their ids."""

from collections.abc import Iterator

from guard.wire import RequestRecord


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
