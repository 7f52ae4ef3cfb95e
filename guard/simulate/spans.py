"""Simulated requests as the hook's own records: what carries them to the service is the real recorder and exporter.

Every span says `kvguard.simulated`; a fetch says the idle RTT that the simulation knows for certain.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from guard import semconv
from guard.connectors import LOAD_SYNC
from guard.hook.recorder import Record, Recorder
from guard.hook.records import DecodeRecord, RequestRecord, Scope
from guard.hook.requests import Attempt, Backend, Leg, RequestState
from guard.hook.spans import CLIENT, make_span, new_id
from guard.simulate.job import Job
from guard.simulate.scenario import Scenario
from guard.wire import AttributeValue, Span

_LEG: Final = 0


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
        share = (self.end - self.start) // len(self.span_ids)
        for number, span_id in enumerate(self.span_ids):
            start = self.start + number * share
            yield make_span(
                self.state, self.name, span_id, self.parent_id, start, start + share, dict(self.attributes), CLIENT
            )


class Teller:
    """Tells the recorder of one engine about its requests. `anchor_ns` turns the simulation's clock into Unix time."""

    def __init__(
        self, scenario: Scenario, scope: Scope, backend: Backend, recorder: Recorder, anchor_ns: int, rng: random.Random
    ) -> None:
        self._scenario = scenario
        self._scope = scope
        self._backend = backend
        self._recorder = recorder
        self._anchor = anchor_ns
        self._rng = rng
        self._told: dict[int, RequestState] = {}

    def first(self, now: float, job: Job) -> None:
        """A first token, or an abort before it."""
        state = self._state(job)
        facts: dict[str, AttributeValue] = {semconv.NETWORK_RTT: job.rtt}
        attempts: tuple[Attempt, ...] = ()
        if job.fetch_start and not job.gave_up:
            attempts = (self._attempt(job),)
            if self._backend.capability.reads_in_process:
                facts[semconv.ROUND_TRIPS] = round(job.fetch_trips)
        state.attempts.extend(attempts)
        done = tuple(each for each in attempts if each.end)
        record = RequestRecord(state, self._scope, done, tuple(each for each in attempts if not each.end), _ns(now))
        self._recorder.append(Simulated(record, facts))
        if done and job.loaded and self._backend.capability.reads_in_process:
            chunks = job.loaded // self._scenario.connector.chunk_tokens
            size = job.fetch_bytes // chunks
            read: dict[str, AttributeValue] = {
                semconv.OPERATION: "GET", semconv.KEYS: 1, semconv.BYTES: size, semconv.OUTCOME: semconv.OUTCOME_OK,
            }  # fmt: skip
            self._operations(state, semconv.SPAN_READ, done[0].span_id, done[0].start, done[0].end, chunks, read)
        if job.first and job.prompt.output > 1:
            self._told[job.number] = state

    def stored(self, now: float, job: Job, tokens: int, seconds: float) -> None:
        """Its KV goes to the store."""
        state = self._told.get(job.number)
        if state is not None:
            size = tokens * self._scenario.connector.bytes_per_token
            facts: dict[str, AttributeValue] = {
                semconv.TOKENS: tokens, semconv.BYTES: size, semconv.OUTCOME: semconv.OUTCOME_OK,
                semconv.BLOCKS: tokens // self._backend.block_tokens,
            }  # fmt: skip
            self._operations(state, semconv.SPAN_STORE, state.span_id, _ns(now), _ns(now + seconds), 1, facts)

    def finished(self, now: float, job: Job) -> None:
        """The last token."""
        state = self._told.pop(job.number, None)
        if state is not None:
            state.finish, state.output_tokens = _ns(now), job.prompt.output
            self._recorder.append(Simulated(DecodeRecord(state, self._scope)))

    def _state(self, job: Job) -> RequestState:
        rng = self._rng
        state = RequestState(
            request=None, internal_id=f"sim-{job.engine}-{job.number}-{rng.getrandbits(32):08x}",
            trace_id=new_id(128, rng), span_id=new_id(64, rng), parent_id=0, sampled=True, arrival=_ns(job.arrival),
            seen=_ns(job.seen), anchor=self._anchor, prompt_tokens=job.prompt.tokens, running=job.running,
            waiting=job.waiting, draw=job.draw, load_failed=job.failed, alloc=_ns(job.alloc),
            scheduled=_ns(job.scheduled), first=_ns(job.first),
        )  # fmt: skip
        leg = state.legs[_LEG] = Leg(self._backend, new_id(64, rng))
        leg.skip, leg.load, leg.directive_id = job.skip, job.load, job.directive_id
        leg.propensity = job.propensity or 0.0
        leg.local, leg.matched = job.local, job.matched
        leg.first_poll = leg.start = _ns(job.lookup_start) or _ns(job.scheduled)
        if job.lookup_start:
            leg.end, leg.polls = _ns(job.lookup_end), 1
            if self._backend.capability.reads_in_process:
                leg.round_trips = round(job.lookup_trips)
        return state

    def _attempt(self, job: Job) -> Attempt:
        sync = self._backend.capability.load == LOAD_SYNC
        attempt = Attempt(
            backend=self._backend, number=1, span_id=new_id(64, self._rng), start=_ns(job.fetch_start),
            tokens=job.matched, asynchronous=not sync, inflight=max(1, job.inflight), end=_ns(job.fetch_end),
            batch=job.batch << 8 | job.engine if sync else 0, loaded=job.loaded,
        )  # fmt: skip
        if attempt.end and not job.loaded:
            attempt.failed, attempt.error = True, "simulated"
        return attempt

    def _operations(
        self, state: RequestState, name: str, parent: int, start: int, end: int, count: int,
        facts: dict[str, AttributeValue],
    ) -> None:  # fmt: skip
        common: dict[str, AttributeValue] = {
            semconv.INTERNAL_ID: state.internal_id,
            semconv.ENGINE_ID: self._scope.engine_id,
            semconv.BACKEND: self._backend.label,
        }
        ids = [new_id(64, self._rng) for _ in range(count)]
        self._recorder.append(Simulated(Operations(state, name, parent, ids, start, end, {**common, **facts})))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
