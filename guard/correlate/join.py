"""Joins spans into requests as they arrive, in any order, from any process, any number of times.

A request is known by the span id of its `kvguard.request` span, which its lookups, fetches and stores name as parent;
loads and reads name a fetch or a lookup. `llm_request` and `kvguard.decode` are found by parent too, else by request
id (`loose_ends.py`); LMCache's `mp.*` spans by session id = vLLM's internal id.

A record is given out as soon as its span and the lookups and fetches it speaks of are here (about first-token time),
or else when the watermark passes: `lateness_seconds` after the request span arrived. What comes later amends it: reads
and loads until the watermark; decode, `llm_request`, stores, `mp.*` and fetches (one can outlive its client by minutes)
until it is forgotten. All times are those of arrival, as told by the caller: no clock of a sender holds anything up.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from guard import semconv as s
from guard.correlate.counts import Counts, add, kind_of
from guard.correlate.loose_ends import LooseEnds
from guard.correlate.parking import Parking
from guard.correlate.pending import Pending
from guard.correlate.records import request_record
from guard.wire import AttributeValue, RequestRecord, Span

_INNER = frozenset((s.SPAN_READ, s.SPAN_LOAD))
_OUTER = frozenset((s.SPAN_LOOKUP, s.SPAN_FETCH, s.SPAN_STORE))
_ENDS = frozenset((s.SPAN_DECODE, s.SPAN_VLLM_REQUEST))


class Joiner:
    """The join. Memory is bounded by its arguments; what is dropped for that is counted."""

    def __init__(
        self,
        *,
        lateness_seconds: float = 10.0,
        patience_seconds: float = 300.0,
        retention_seconds: float = 900.0,
        max_pending: int = 20_000,
        max_retained: int = 50_000,
        max_spans_per_request: int = 2048,
    ) -> None:
        """Sets the bounds.

        Args:
            lateness_seconds: how long after its request span a request waits for the rest.
            patience_seconds: how long a lookup or fetch waits for its request span, which ends at the first token.
            retention_seconds: how long after the watermark a record can still be amended by what ends with the
                request.
            max_pending: requests that have not reached their watermark; also bounds spans that wait for one.
            max_retained: requests past their watermark that can still be amended.
            max_spans_per_request: spans of one request that are taken.
        """
        self.counts = Counts()
        self.amended: list[RequestRecord] = []
        """Records given out earlier that the last `advance` has changed."""
        self._lateness_ns = int(lateness_seconds * 1e9)
        self._patience_ns = int(patience_seconds * 1e9)
        self._retention_ns = int(retention_seconds * 1e9)
        self._max_pending, self._max_retained = max_pending, max_retained
        self._max_spans = max_spans_per_request
        self._now_ns = 0
        self._by_span: dict[str, Pending] = {}
        self._by_session: dict[str, Pending] = {}
        self._unrooted: dict[str, Pending] = {}  # oldest first, as all that follow
        self._closing: deque[tuple[int, Pending]] = deque()
        self._retained: deque[tuple[int, Pending]] = deque()
        self._parked = Parking(self.counts, 4 * max_pending, max_spans_per_request)
        self._loose = LooseEnds(self.counts, 4 * max_pending)
        self._ready: list[Pending] = []
        self._changed: dict[str, Pending] = {}

    @property
    def pending(self) -> int:
        """Requests that have not reached their watermark."""
        return len(self._unrooted) + len(self._closing)

    @property
    def waiting(self) -> int:
        """Spans that wait for their request."""
        unrooted = sum(sum(one.kinds.values()) for one in self._unrooted.values())
        return unrooted + len(self._parked) + len(self._loose)

    def add(self, resource: Mapping[str, AttributeValue], spans: Sequence[Span], now_ns: int) -> None:
        """Takes the spans of one resource, which arrived at `now_ns`."""
        self._now_ns = max(self._now_ns, now_ns)
        self.counts.received += len(spans)
        inner: dict[str, Span] = {}  # loads or reads of one parent that came one after the other
        last = ("", "")
        for span in spans:
            name = span.name
            if name in _INNER:
                if (name, span.parent_id) != last or span.span_id in inner:
                    self._inner(*last, inner)
                    inner, last = {}, (name, span.parent_id)
                inner[span.span_id] = span
            elif name in _OUTER:
                self._outer(span)
            elif name == s.SPAN_REQUEST:
                self._request(span, resource)
            elif name in _ENDS:
                self._end(span)
            elif name.startswith(s.LMCACHE_SPAN_PREFIX):
                self._server(span)
            else:
                self.counts.ignored += 1
        self._inner(*last, inner)

    def advance(self, now_ns: int) -> list[RequestRecord]:
        """Moves the time on. Returns the records that are new, each once; sets `amended`."""
        now = self._now_ns = max(self._now_ns, now_ns)
        while self._closing and self._closing[0][0] <= now:
            self._close(self._closing.popleft()[1])
        while self._retained and self._retained[0][0] <= now:
            self._forget(self._retained.popleft()[1])
        while self._unrooted and (first := next(iter(self._unrooted.values()))).first_ns + self._patience_ns <= now:
            self._drop_unrooted(first, self.counts.orphans)
        self._parked.expire(now - self._patience_ns)
        self._loose.expire(now - self._lateness_ns)
        records: list[RequestRecord] = []
        for one in self._ready:
            one.fill()
            if one.record is not None:
                records.append(one.record)
        self._ready.clear()
        self.amended = []
        for one in self._changed.values():
            if one.dirty and one.record is not None:
                one.fill()
                self.amended.append(one.record)
        self._changed.clear()
        self.counts.records += len(records)
        self.counts.amended += len(self.amended)
        return records

    # -- Spans by what they are ---------------------------------------------------------------------------------------

    def _request(self, span: Span, resource: Mapping[str, AttributeValue]) -> None:
        root = span.span_id
        one = self._by_span.get(root)
        if one is None:
            one = self._open(root)
        elif one.record is not None:
            self.counts.duplicates += 1
            return
        self._unrooted.pop(root, None)
        record = one.record = request_record(span, resource)
        for key in record.clamped:
            self.counts.clamped[key] = self.counts.clamped.get(key, 0) + 1
        self.counts.joined += 1 + sum(one.kinds.values())
        one.kinds.clear()
        self._closing.append((self._now_ns + self._lateness_ns, one))
        for end in self._loose.take(root):
            self._attach(one, end, one.late)
        if record.internal_id:
            self._by_session[record.internal_id] = one
            self._adopt(one, "session " + record.internal_id)
        name = record.request_id or record.internal_id
        if name:
            for other in self._loose.enter(one, name):
                if other.dirty:
                    self._touch(other)
        one.dirty = True
        self._touch(one)

    def _outer(self, span: Span) -> None:
        one = self._by_span.get(span.parent_id)
        if one is None:
            if not span.parent_id:
                add(self.counts.orphans, (span,))
                return
            one = self._open(span.parent_id)
        if span.name == s.SPAN_STORE or (one.seen is None and span.name == s.SPAN_FETCH):
            self._attach(one, span, one.late)
        elif self._attach(one, span, one.seen):
            self._by_span.setdefault(span.span_id, one)
            self._adopt(one, span.span_id)

    def _inner(self, name: str, parent: str, spans: dict[str, Span]) -> None:
        """Takes loads or reads of one parent, by id: most spans of in-process connectors, so many at a time."""
        if not spans:
            return
        one = self._by_span.get(parent)
        if one is not None:
            self._attach_inner(one, name, parent, spans)
            return
        self._parked.add_all(parent, spans, self._now_ns)

    def _end(self, span: Span) -> None:
        one = self._by_span.get(span.parent_id)
        if one is not None:
            self._attach(one, span, one.late)
            return
        for other in self._loose.add(span, self._now_ns):
            if other.dirty:
                self._touch(other)

    def _server(self, span: Span) -> None:
        session = str(span.attributes.get(s.LMCACHE_SESSION_ID, ""))
        if not session:
            add(self.counts.orphans, (span,))
            return
        one = self._by_session.get(session)
        if one is None:
            self._parked.add("session " + session, span, self._now_ns)
        else:
            self._attach(one, span, one.late)

    # -- Keeping ------------------------------------------------------------------------------------------------------

    def _open(self, root: str) -> Pending:
        while len(self._unrooted) + len(self._closing) >= self._max_pending:
            self._evict()
        one = Pending(root, self._now_ns)
        self._by_span[root] = self._unrooted[root] = one
        self._adopt(one, root)
        return one

    def _attach(self, one: Pending, span: Span, ids: set[str] | None) -> bool:
        """Gives the span to the request; False where it is a duplicate, too late or one too many."""
        if ids is None:
            add(self.counts.orphans, (span,))
            return False
        if span.span_id in ids:
            self.counts.duplicates += 1
            return False
        if len(ids) >= self._max_spans:
            add(self.counts.overflow, (span,))
            return False
        ids.add(span.span_id)
        one.attach(span)
        if one.record is None:
            one.kinds[span.name] = one.kinds.get(span.name, 0) + 1
        else:
            self.counts.joined += 1
            self._touch(one)
        return True

    def _attach_inner(self, one: Pending, name: str, parent: str, spans: dict[str, Span]) -> None:
        """As `_attach` for loads or reads of one parent, by id."""
        ids = one.seen
        if ids is None or len(ids) + len(spans) > self._max_spans or not ids.isdisjoint(spans):
            for span in spans.values():
                self._attach(one, span, ids)
            return
        ids.update(spans)
        one.attach_inner(name, parent, spans.values())
        if one.record is None:
            one.kinds[name] = one.kinds.get(name, 0) + len(spans)
            return
        self.counts.joined += len(spans)
        if one.given:
            self._changed[one.root] = one

    def _touch(self, one: Pending) -> None:
        if one.given:
            self._changed[one.root] = one
        elif one.complete:
            one.given = True
            self._ready.append(one)

    def _adopt(self, one: Pending, key: str) -> None:
        """Attaches the spans that waited for this fetch, lookup, request or session."""
        if self._parked and (spans := self._parked.take(key)):
            for name in _INNER:
                inner = {span_id: span for span_id, span in spans.items() if span.name == name}
                if inner:
                    self._attach_inner(one, name, key, inner)
            for span in spans.values():
                if span.name not in _INNER:
                    self._attach(one, span, one.late)

    # -- Letting go ---------------------------------------------------------------------------------------------------

    def _close(self, one: Pending) -> None:
        """Passes a request's watermark."""
        if not one.given:
            one.given = True
            self.counts.incomplete += 1
            self._ready.append(one)
        one.seen = None
        one.late.update(one.fetches)
        for span_id in (*one.fetches, *one.lookups):
            if span_id != one.root and self._by_span.get(span_id) is one:
                del self._by_span[span_id]
        self._retained.append((self._now_ns + self._retention_ns, one))
        while len(self._retained) > self._max_retained:
            self._forget(self._retained.popleft()[1])

    def _forget(self, one: Pending) -> None:
        if self._by_span.get(one.root) is one:
            del self._by_span[one.root]
        if one.record is not None and self._by_session.get(one.record.internal_id) is one:
            del self._by_session[one.record.internal_id]
        self._loose.leave(one)

    def _drop_unrooted(self, one: Pending, lost: dict[str, int]) -> None:
        del self._unrooted[one.root]
        for span_id in (one.root, *one.fetches, *one.lookups):
            if self._by_span.get(span_id) is one:
                del self._by_span[span_id]
        for name, count in one.kinds.items():
            lost[kind_of(name)] = lost.get(kind_of(name), 0) + count

    def _evict(self) -> None:
        """Makes room for a request: the oldest goes; one whose own span is here is given out early, not lost."""
        oldest = next(iter(self._unrooted.values()), None)
        if oldest is not None and (not self._closing or oldest.first_ns <= self._closing[0][1].first_ns):
            self._drop_unrooted(oldest, self.counts.evicted)
        else:
            self._close(self._closing.popleft()[1])
