"""One simulated engine: requests go through the real gate, and their records are those of the real hook.

Nothing here waits: every step schedules the next one. Times are seconds on the simulation's clock; the records hold
nanoseconds, as in the hook.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from guard import gate, semconv
from guard.connectors import LOAD_ASYNC, Capability
from guard.costs import Traffic
from guard.hook.recorder import Record, Recorder
from guard.hook.requests import Attempt, Backend, DecodeRecord, Leg, RequestRecord, RequestState, Scope
from guard.simulate import model
from guard.wire import AttributeValue, Directive, Span

STEP_SECONDS: Final = 0.004
"""A scheduler step: what a request waits for before somebody looks at it."""

FAILED_FETCHES: Final = 0.005
ABORTED: Final = 0.01
FAILURE_SECONDS: Final = 0.25
_LEG: Final = 0
_CLIENT: Final = 3

At = Callable[[float, Callable[[float], None]], None]


class Leases(Protocol):
    """What the engine needs of `guard.hook.directives.Directives`."""

    def current(self, backend: str) -> Directive | None:
        """The directive in force."""
        ...


@dataclass(slots=True)
class Simulated:
    """A record of the hook whose spans are marked as simulated; `fetch` adds what a simulation knows for certain."""

    record: Record
    fetch: Mapping[str, AttributeValue] = field(default_factory=dict)

    def spans(self) -> Iterator[Span]:
        """The record's spans, marked."""
        for span in self.record.spans():
            span.attributes[semconv.SIMULATED] = True
            if span.name == semconv.SPAN_FETCH:
                span.attributes.update(self.fetch)
            yield span


@dataclass(slots=True)
class Operations:
    """Operations against the store, one after the other: the reads of a fetch, or one store."""

    state: RequestState
    name: str
    parent_id: int
    span_ids: list[int]
    start: int
    end: int
    attributes: dict[str, AttributeValue]

    def spans(self) -> Iterator[Span]:
        """One span per operation, each with its share of the time."""
        state, share = self.state, (self.end - self.start) // len(self.span_ids)
        for number, span_id in enumerate(self.span_ids):
            start = self.start + number * share + state.anchor
            yield Span(
                name=self.name, trace_id=f"{state.trace_id:032x}", span_id=f"{span_id:016x}",
                parent_id=f"{self.parent_id:016x}", start_ns=start, end_ns=start + share,
                attributes=dict(self.attributes), kind=_CLIENT,
            )  # fmt: skip


@dataclass(slots=True)
class Job:
    """One request on its way."""

    state: RequestState
    leg: Leg
    prompt: model.Prompt
    attempt: Attempt | None = None
    facts: dict[str, AttributeValue] = field(default_factory=dict)


class Engine:
    """Queues, caches and times of one engine. `at` schedules a step; `anchor_ns` turns its clock into Unix time."""

    def __init__(
        self,
        number: int,
        scope: Scope,
        backend: Backend,
        *,
        recorder: Recorder,
        directives: Leases,
        link: model.Link,
        store: model.PrefixCache,
        rng: random.Random,
        at: At,
        anchor_ns: int,
    ) -> None:
        self.backend = backend
        self._number = number
        self._scope = scope
        self._recorder = recorder
        self._directives = directives
        self._link = link
        self._store = store
        self._rng = rng
        self._at = at
        self._anchor = anchor_ns
        self._local = model.PrefixCache(40_000, model.BLOCK_TOKENS)
        self._count = 0
        self._queue: deque[Job] = deque()
        self._busy = False
        self._waiting = 0
        self._decoding = 0
        self._inflight = 0

    @property
    def _capability(self) -> Capability:
        return self.backend.capability

    def arrive(self, now: float, prompt: model.Prompt) -> None:
        """A request comes in."""
        self._count += 1
        rng = self._rng
        intake = rng.lognormvariate(-6.2, 0.4)  # about 2 ms
        state = RequestState(
            request=None,
            internal_id=f"sim-{self._number}-{self._count}-{rng.getrandbits(32):08x}",
            trace_id=rng.getrandbits(128) or 1,
            span_id=rng.getrandbits(64) or 1,
            parent_id=0,
            sampled=True,
            arrival=_ns(now),
            seen=_ns(now + intake),
            anchor=self._anchor,
            prompt_tokens=prompt.tokens,
            running=self._decoding,
            waiting=self._waiting,
            draw=rng.random(),
        )
        leg = state.legs[_LEG] = Leg(self.backend, rng.getrandbits(64) or 1)
        job = Job(state, leg, prompt)
        self._waiting += 1
        self._at(now + intake + self._step(), lambda at: self._look_up(at, job))

    def _look_up(self, now: float, job: Job) -> None:
        state, leg, prompt = job.state, job.leg, job.prompt
        leg.local = self._local.matched(prompt.conversation, prompt.tokens)
        directive = self._directives.current(self.backend.label)
        leg.directive_id = directive.id if directive else ""
        leg.skip = gate.admit_lookup(
            directive, self._capability, prompt_tokens=prompt.tokens, local_tokens=leg.local,
            traffic=Traffic(inflight=self._inflight), draw=state.draw,
        )  # fmt: skip
        if not leg.skip.admitted:
            self._ready(now, job)
            return
        leg.start = leg.first_poll = _ns(now)
        leg.round_trips = -(-prompt.tokens // model.CHUNK_TOKENS)
        seconds = model.LOOKUP_SECONDS + leg.round_trips * self._rtt(now)
        leg.polls = 1 + int(seconds / STEP_SECONDS) if self._asynchronous else 1
        self._at(now + seconds, lambda at: self._looked_up(at, job, directive))

    def _looked_up(self, now: float, job: Job, directive: Directive | None) -> None:
        leg, prompt = job.leg, job.prompt
        leg.end = _ns(now)
        leg.matched = max(0, self._store.matched(prompt.conversation, prompt.tokens) - leg.local)
        if leg.matched:
            leg.load = gate.admit_load(
                directive, self._capability, matched_tokens=leg.matched,
                matched_bytes=leg.matched * self.backend.token_bytes, traffic=Traffic(inflight=self._inflight),
                draw=job.state.draw,
            )  # fmt: skip
        if leg.load is None or not leg.load.admitted:
            self._ready(now, job)
        elif self._asynchronous:
            self._at(now + self._step(), lambda at: self._fetch(at, job, lambda end: self._ready(end, job)))
        else:
            self._ready(now, job)  # loaded inside its step

    def _fetch(self, now: float, job: Job, then: Callable[[float], None]) -> None:
        leg, rtt = job.leg, self._rtt(now)
        self._inflight += 1
        if not job.state.alloc:
            job.state.alloc = _ns(now)
        attempt = job.attempt = Attempt(
            backend=self.backend, number=1, span_id=self._rng.getrandbits(64) or 1, start=_ns(now),
            tokens=leg.matched, asynchronous=self._asynchronous, inflight=self._inflight,
            batch=0 if self._asynchronous else self._rng.getrandbits(63) + 1,
        )  # fmt: skip
        job.state.attempts.append(attempt)
        trips = -(-leg.matched // model.CHUNK_TOKENS)
        job.facts = {semconv.ROUND_TRIPS: trips, semconv.NETWORK_RTT: rtt}
        if self._rng.random() < FAILED_FETCHES:
            attempt.failed, attempt.error, end = True, "simulated", now + FAILURE_SECONDS
        else:
            end = self._link.transfer(now, leg.matched * self.backend.token_bytes)
            end += model.FETCH_SECONDS + trips * rtt
        self._at(end, lambda at: self._fetched(at, job, then))

    def _fetched(self, now: float, job: Job, then: Callable[[float], None]) -> None:
        attempt, state = job.attempt, job.state
        assert attempt is not None  # noqa: S101
        self._inflight -= 1
        attempt.end = _ns(now)
        state.load_failed = attempt.failed
        attempt.loaded = 0 if attempt.failed else attempt.tokens
        if self._capability.reads_in_process and not attempt.failed:
            count = -(-attempt.tokens // model.CHUNK_TOKENS)
            self._operations(
                job, semconv.SPAN_READ, attempt.span_id, attempt.start, attempt.end, count,
                {semconv.OPERATION: "GET", semconv.KEYS: 1,
                 semconv.BYTES: attempt.tokens * self.backend.token_bytes // count},
            )  # fmt: skip
        then(now)

    def _ready(self, now: float, job: Job) -> None:
        self._queue.append(job)
        self._next(now)

    def _next(self, now: float) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        job = self._queue.popleft()
        state = job.state
        state.alloc = state.alloc or _ns(now)
        state.scheduled = _ns(now)
        self._waiting -= 1
        if self._rng.random() < ABORTED:
            self._tell(now, job)
            self._free(now)
        elif job.leg.load is not None and job.leg.load.admitted and job.attempt is None:
            self._fetch(now, job, lambda end: self._prefill(end, job))  # the whole batch waits for it
        else:
            self._prefill(now, job)

    def _prefill(self, now: float, job: Job) -> None:
        loaded = job.attempt.loaded if job.attempt else 0
        computed = max(1, job.prompt.tokens - job.leg.local - loaded)
        seconds = model.prefill_seconds(job.prompt.tokens, computed) * (1.0 + 0.01 * self._decoding)
        self._at(now + seconds, lambda at: self._first_token(at, job))

    def _first_token(self, now: float, job: Job) -> None:
        state, prompt = job.state, job.prompt
        state.first = _ns(now)
        self._tell(now, job)
        self._local.put(prompt.conversation, prompt.tokens)
        directive = self._directives.current(self.backend.label)
        if directive is None or directive.stores:
            self._write(now, job)
        self._decoding += 1
        state.output_tokens = prompt.output
        self._at(
            now + (prompt.output - 1) * model.DECODE_SECONDS * (1.0 + 0.02 * self._decoding),
            lambda at: self._finish(at, job),
        )
        self._free(now)

    def _finish(self, now: float, job: Job) -> None:
        self._decoding -= 1
        job.state.finish = _ns(now)
        self._recorder.append(Simulated(DecodeRecord(job.state, self._scope)))

    def _write(self, now: float, job: Job) -> None:
        new = self._store.put(job.prompt.conversation, job.prompt.tokens)
        if new:
            size = new * self.backend.token_bytes
            self._at(
                self._link.transfer(now, size) + self._rtt(now),
                lambda at: self._operations(
                    job, semconv.SPAN_STORE, job.state.span_id, _ns(now), _ns(at), 1,
                    {semconv.TOKENS: new, semconv.BLOCKS: new // model.BLOCK_TOKENS, semconv.BYTES: size},
                ),
            )  # fmt: skip

    def _operations(
        self, job: Job, name: str, parent: int, start: int, end: int, count: int, facts: dict[str, AttributeValue]
    ) -> None:
        common: dict[str, AttributeValue] = {
            semconv.INTERNAL_ID: job.state.internal_id,
            semconv.ENGINE_ID: self._scope.engine_id,
            semconv.BACKEND: self.backend.label,
            semconv.OUTCOME: semconv.OUTCOME_OK,
        }
        ids = [self._rng.getrandbits(64) or 1 for _ in range(count)]
        self._recorder.append(Simulated(Operations(job.state, name, parent, ids, start, end, {**common, **facts})))

    def _tell(self, now: float, job: Job) -> None:
        record = RequestRecord(job.state, self._scope, tuple(job.state.attempts), (), _ns(now))
        self._recorder.append(Simulated(record, job.facts))

    def _free(self, now: float) -> None:
        self._busy = False
        self._next(now)

    @property
    def _asynchronous(self) -> bool:
        return self._capability.load == LOAD_ASYNC

    def _rtt(self, now: float) -> float:
        return model.rtt_seconds(now, self._number) * self._rng.lognormvariate(0.0, 0.1)

    def _step(self) -> float:
        return self._rng.uniform(0.0, STEP_SECONDS)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
