"""What is known of one request while its spans come in."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from guard import semconv as s
from guard.correlate.records import fetch_record, set_residual
from guard.wire import FetchRecord, RequestRecord, Span

MAX_SERVER_SPANS = 64


@dataclass(slots=True)
class Lookup:
    """A lookup span and what its `kvguard.kv.read` children add to it."""

    polls: int
    round_trips: int | None
    reads: int = 0


@dataclass(slots=True)
class Pending:
    """One request: its record once its own span is here, and its children in whatever order they came."""

    root: str
    first_ns: int
    record: RequestRecord | None = None
    seen: set[str] | None = field(default_factory=set)  # ids of its spans; None once it is closed to new children
    late: set[str] = field(default_factory=set)  # ids of those that may come until it is forgotten
    kinds: dict[str, int] = field(default_factory=dict)  # children by span name, while there is no record
    fetches: dict[str, FetchRecord] = field(default_factory=dict)
    read_ns: dict[str, int] = field(default_factory=dict)  # by fetch: exact, so that no order of addition shows
    lookups: dict[str, Lookup] = field(default_factory=dict)
    server: list[Span] = field(default_factory=list)
    stores: int = 0
    store_bytes: int = 0
    vllm: Span | None = None
    decode: Span | None = None
    vllm_loose: Span | None = None  # found by request id, which a span with the right parent overrides
    decode_loose: Span | None = None
    given: bool = False
    dirty: bool = False
    join_key: str = ""

    def attach_inner(self, name: str, parent: str, run: Collection[Span]) -> None:
        """Takes loads or reads of one parent. Their ids must be new."""
        self.dirty = True
        fetch = self.fetches.get(parent)
        if fetch is None:
            if name == s.SPAN_READ and (lookup := self.lookups.get(parent)) is not None:
                lookup.reads += len(run)
        elif name == s.SPAN_READ:
            fetch.reads += len(run)
            fetch.read_bytes += sum([_count(span, s.BYTES, 0) for span in run])
            self.read_ns[parent] = self.read_ns.get(parent, 0) + sum([span.end_ns - span.start_ns for span in run])
        else:
            for span in run:
                rank = _count(span, s.RANK, 0)
                fetch.ranks[rank] = max(span.seconds, fetch.ranks.get(rank, 0.0))

    def attach(self, span: Span) -> None:
        """Takes a child span. Its id must be new."""
        name, get = span.name, _getter(span)
        if name == s.SPAN_READ or name == s.SPAN_LOAD:
            self.attach_inner(name, span.parent_id, (span,))
        elif name == s.SPAN_LOOKUP:
            self.lookups[span.span_id] = Lookup(get(s.POLLS, 0), get(s.ROUND_TRIPS))
        elif name == s.SPAN_FETCH:
            self.fetches[span.span_id] = fetch_record(span)
        elif name == s.SPAN_STORE:
            self.stores += 1
            self.store_bytes += get(s.BYTES, 0)
        elif name == s.SPAN_DECODE:
            self.decode = _first(self.decode, span)
        elif name == s.SPAN_VLLM_REQUEST:
            self.vllm = _first(self.vllm, span)
        else:
            self.server.append(span)
        self.dirty = True

    @property
    def complete(self) -> bool:
        """Whether the lookup and every fetch attempt that the request speaks of are here."""
        record = self.record
        if record is None or (record.lookup > 0.0 and not self.lookups):
            return False
        if not self.fetches:
            return not (record.fetch > 0.0 or record.tokens_loaded > 0)
        return max(fetch.attempt for fetch in self.fetches.values()) <= len(self.fetches)

    def fill(self) -> None:
        """Writes what the children say into the record. The same children give the same record in every order."""
        record = self.record
        if record is None:
            return
        self.dirty = False
        fetches = list(self.fetches.values())
        if len(fetches) > 1:
            fetches.sort(key=lambda fetch: (fetch.attempt, fetch.start_ns, fetch.span_id))
        for fetch in fetches:
            if fetch.reads:
                fetch.read_seconds = self.read_ns.get(fetch.span_id, 0) / 1e9
            if len(fetch.ranks) > 1:
                fetch.ranks = dict(sorted(fetch.ranks.items()))
        record.fetches = fetches
        if self.lookups:
            lookups = self.lookups.values()
            trips = [one.reads if one.round_trips is None else one.round_trips for one in lookups]
            known = sum(trips) or any(one.round_trips is not None for one in lookups)
            record.lookup_round_trips = sum(trips) if known else None
            record.lookup_polls = sum([one.polls for one in lookups])
        record.stores, record.store_bytes = self.stores, self.store_bytes
        if self.server:
            self.server.sort(key=lambda span: (span.start_ns, span.span_id))
            record.server_spans = self.server[:MAX_SERVER_SPANS]
        vllm, decode = self.vllm or self.vllm_loose, self.decode or self.decode_loose
        if vllm is not None:
            get = _getter(vllm)
            record.vllm_ttft, record.vllm_e2e = get(s.VLLM_TTFT), get(s.VLLM_E2E)
            record.vllm_queue, record.vllm_prefill = get(s.VLLM_QUEUE), get(s.VLLM_PREFILL)
        else:
            record.vllm_ttft = record.vllm_e2e = record.vllm_queue = record.vllm_prefill = None
        if decode is not None:
            get = _getter(decode)
            record.output_tokens, record.tpot = get(s.OUTPUT_TOKENS), get(s.TPOT)
        else:
            record.output_tokens = record.tpot = None
        set_residual(record)


def _count(span: Span, key: str, default: int) -> int:
    value = span.attributes.get(key, default)
    return value if isinstance(value, int) else default


def _getter(span: Span) -> Any:
    return span.attributes.get


def _first(one: Span | None, other: Span) -> Span:
    """The earlier of two spans that should be one: the same whichever came first."""
    if one is None or (other.start_ns, other.span_id) < (one.start_ns, one.span_id):
        return other
    return one
