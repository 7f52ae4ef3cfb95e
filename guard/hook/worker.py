"""The worker's side: each rank times its own share of the loads, on its own clock. Standard library only."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from guard import semconv
from guard.hook.envelope import Context, Envelope, Load
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.spans import make_span, new_rng
from guard.wire import AttributeValue, Span

CONTEXTS_LIMIT: Final = 16384
LOAD_LIMIT_NS: Final = 600 * 10**9


@dataclass(slots=True)
class Owner:
    """What `make_span` needs to know of a trace."""

    trace_id: int
    sampled: bool
    anchor: int


@dataclass(slots=True)
class LoadRecord:
    """One rank's share of a fetch, or one store, that has ended."""

    name: str
    context: Context
    scope: Scope
    backend: Backend
    rank: int
    span_id: int
    parent_id: int
    start: int
    end: int
    anchor: int
    tokens: int
    attempt: int = 0
    batch: int = 0
    failed: bool = False

    def spans(self) -> Iterator[Span]:
        """One span."""
        ids = self.scope.ids(self.context.request_id)
        attributes: dict[str, AttributeValue] = {
            semconv.INTERNAL_ID: ids[semconv.INTERNAL_ID],
            semconv.ENGINE_ID: self.scope.engine_id,
            semconv.BACKEND: self.backend.label,
            semconv.RANK: self.rank,
            semconv.OUTCOME: semconv.OUTCOME_FAILED if self.failed else semconv.OUTCOME_OK,
        }
        if self.attempt:
            attributes[semconv.ATTEMPT] = self.attempt
        if self.tokens:
            attributes[semconv.TOKENS] = self.tokens
            attributes[semconv.BLOCKS] = -(-self.tokens // self.backend.block_tokens)
            if self.backend.rank_bytes:
                attributes[semconv.BYTES] = self.tokens * self.backend.rank_bytes
        if self.batch:
            attributes[semconv.BATCH] = f"{self.batch:016x}"
        if self.backend.address:
            attributes[semconv.SERVER_ADDRESS] = self.backend.address
            if self.backend.port:
                attributes[semconv.SERVER_PORT] = self.backend.port
        owner = Owner(self.context.trace_id, self.context.sampled, self.anchor)
        span = make_span(owner, self.name, self.span_id, self.parent_id, self.start, self.end, attributes, 3)
        span.error = self.failed
        yield span


class Contexts:
    """The traces of recent requests in this worker process; read by the drain thread too."""

    def __init__(self, limit: int = CONTEXTS_LIMIT) -> None:
        self._limit = limit
        self._known: OrderedDict[str, Context] = OrderedDict()
        self._fetch: OrderedDict[str, int] = OrderedDict()

    def add(self, envelope: Envelope) -> None:
        """Takes in what a step brought."""
        for context in envelope.contexts:
            self._known[context.request_id] = context
        for load in envelope.loads:
            self._fetch[load.request_id] = load.fetch_span
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        while len(self._fetch) > self._limit:
            self._fetch.popitem(last=False)

    def get(self, request_id: str) -> Context | None:
        """The trace of a request."""
        return self._known.get(request_id)

    def fetch_span(self, request_id: str) -> int:
        """The span of the latest fetch attempt of a request, 0 where there was none."""
        return self._fetch.get(request_id, 0)


class WorkerSide:
    """One guarded connector in one worker process."""

    def __init__(
        self, recorder: Recorder, scope: Scope, backend: Backend, rank: int, contexts: Contexts | None = None
    ) -> None:
        self.contexts = contexts or Contexts()
        self._recorder = recorder
        self._scope = scope
        self._backend = backend
        self._rank = rank
        self._rng = new_rng()
        self._open: dict[str, tuple[Load, int]] = {}
        self._stores: dict[str, tuple[int, int]] = {}

    def begin(self, envelope: Envelope, now: int) -> None:
        """A step with an envelope begins its loads."""
        self.contexts.add(envelope)
        for load in envelope.loads:
            if load.asynchronous:
                self._open[load.request_id] = (load, now)
        for request_id, (_, start) in list(self._open.items()) if len(self._open) > 1024 else ():
            if now - start > LOAD_LIMIT_NS:
                del self._open[request_id]

    def synchronous(self, envelope: Envelope, start: int, end: int) -> None:
        """The synchronous loads of a step have ended on this rank."""
        for load in envelope.loads:
            if not load.asynchronous:
                self._record(load, start, end, envelope.batch, failed=False)

    def finished(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """Asynchronous loads have ended on this rank."""
        now = 0
        for request_id in request_ids:
            entry = self._open.pop(request_id, None)
            if entry is not None:
                now = now or time.monotonic_ns()
                self._record(*entry, now, 0, failed=request_id in failed)

    def stores(self, pending: dict[str, int], began: int = 0) -> None:
        """Compares the stores that are under way with those that were: new ones began, missing ones have ended.

        `began` is when the step's submission of stores began, which may do a good part of the work.
        """
        if not pending and not self._stores:
            return
        now = time.monotonic_ns()
        for request_id in [each for each in self._stores if each not in pending]:
            start, tokens = self._stores.pop(request_id)
            self.stored(request_id, start, now, tokens)
        for request_id, tokens in pending.items():
            self._stores.setdefault(request_id, (began or now, tokens))

    def stored(self, request_id: str, start: int, end: int, tokens: int) -> None:
        """One store has ended."""
        context = self.contexts.get(request_id)
        if context is None:
            return
        self._recorder.append(
            LoadRecord(
                semconv.SPAN_STORE, context, self._scope, self._backend, self._rank, self._rng.getrandbits(64) or 1,
                context.request_span, start, end, time.time_ns() - time.monotonic_ns(), tokens,
            )
        )  # fmt: skip

    def _record(self, load: Load, start: int, end: int, batch: int, *, failed: bool) -> None:
        context = self.contexts.get(load.request_id)
        if context is None:
            return
        self._recorder.append(
            LoadRecord(
                semconv.SPAN_LOAD, context, self._scope, self._backend, self._rank, self._rng.getrandbits(64) or 1,
                load.fetch_span, start, end, time.time_ns() - time.monotonic_ns(), load.tokens, load.attempt, batch,
                failed,
            )
        )  # fmt: skip
