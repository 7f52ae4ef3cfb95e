"""The requests of one engine, seen from its scheduler: one table per process, shared by all guarded connectors.

Under a MultiConnector every child sees every request; each writes its own leg, the request itself is told once.
All methods run on the engine thread and take constant time per request. Nothing here imports vLLM: requests come in
as objects with vLLM's attributes, and tests bring their own.
"""

import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from guard.hook.engine_metrics import Tally
from guard.hook.recorder import Recorder
from guard.hook.records import DecodeRecord, FetchRecord, RequestRecord, Scope
from guard.hook.requests import Attempt, Backend, Leg, RequestState
from guard.hook.spans import new_id, new_rng
from guard.hook.traceparent import parse
from guard.pace import Pace

REQUESTS_LIMIT: Final = 65536
"""Requests held at once; vLLM announces the end of every request, so this only bounds a fault."""

ORPHAN_NS: Final = 600 * 10**9
"""A fetch whose request is gone and whose end was not heard of is told as failed after so long."""

_SWEEP_NS: Final = 10**9


class RequestTable:
    """State of every request from its arrival until it has finished and its last load has ended."""

    def __init__(
        self,
        recorder: Recorder,
        scope: Scope,
        *,
        trace_parent: bool = False,
        tally: Tally | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
    ) -> None:
        self.scope = scope
        self.clock = clock
        self.rng = rng or new_rng()
        self.tally = tally
        self._recorder = recorder
        self._trace_parent = trace_parent
        self._wall = wall
        self._requests: dict[str, RequestState] = {}
        self._prefilling: dict[str, RequestState] = {}
        self._loading: dict[str, tuple[RequestState, Attempt]] = {}
        self.paces: dict[str, Pace] = {}  # by backend
        self.backlog = 0  # prompt tokens still to be computed before somebody's first token
        self._unscheduled = 0
        self._away = 0
        self.running = 0
        self._swept = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request, if it is known."""
        return self._requests.get(request_id)

    def arrive(self, request: Any, *, handoff: bool = False) -> RequestState:
        """Starts the state of a request, or finds it; replaces the caller's trace context where that is wanted."""
        request_id: str = request.request_id
        state = self._requests.get(request_id)
        if state is not None:
            return state
        seen = self.clock()
        wall = self._wall()
        headers = getattr(request, "trace_headers", None)
        context = parse(headers.get("traceparent")) if headers is not None else None
        intake = max(0, wall - int(request.arrival_time * 1e9)) if getattr(request, "arrival_time", 0) else 0
        state = RequestState(
            request=request,
            internal_id=request_id,
            trace_id=context.trace_id if context else new_id(128, self.rng),
            span_id=new_id(64, self.rng),
            parent_id=context.span_id if context else 0,
            sampled=context.sampled if context else True,
            arrival=seen - intake,
            seen=seen,
            anchor=wall - seen,
            prompt_tokens=request.num_prompt_tokens,
            running=self.running,
            waiting=self._unscheduled,
            handoff=handoff,
            draw=self.rng.random(),
        )
        if context is not None and self._trace_parent:
            # A copy: vLLM echoes the mapping in every output and may share it between requests.
            request.trace_headers = {**(headers or {}), "traceparent": context.child(state.span_id)}
        if len(self._requests) >= REQUESTS_LIMIT:
            self._forget(next(iter(self._requests)))
        self._requests[request_id] = state
        self._unscheduled += 1
        self.expect(state, state.prompt_tokens)
        return state

    @property
    def waiting(self) -> int:
        """Requests that have no first token yet and wait for the GPU."""
        return self._unscheduled + len(self._prefilling) - self._away

    def expect(self, state: RequestState, tokens: int) -> None:
        """`state` still has `tokens` to compute before its first one."""
        self.backlog += tokens - state.todo
        state.todo = tokens

    def _leaves(self, state: RequestState, away: bool) -> None:
        self._away += away - state.away
        state.away = away

    def pace(self, backend: Backend) -> Pace:
        """What was seen of a backend's reads."""
        found = self.paces.get(backend.label)
        if found is None:
            found = self.paces[backend.label] = Pace()
        return found

    def leg(self, state: RequestState, key: int, backend: Backend) -> Leg:
        """The leg of one connector, made at its first sight of the request."""
        leg = state.legs.get(key)
        if leg is None:
            leg = state.legs[key] = Leg(backend, new_id(64, self.rng))
        return leg

    def allocated(
        self, state: RequestState, leg: Leg, blocks: Any, tokens: int, *, asynchronous: bool
    ) -> Attempt | None:
        """Blocks were allocated; `tokens` > 0 starts a fetch attempt by this leg, which is returned."""
        now = self.clock()
        if not state.alloc:
            state.alloc = now
        if tokens <= 0:
            return None
        rest = max(state.prompt_tokens - leg.local - tokens, 1)
        self.expect(state, 0 if asynchronous else rest)
        self._leaves(state, asynchronous and not state.first)
        pace = self.pace(leg.backend)
        pace.age_out(now)
        size = tokens * leg.backend.token_bytes
        moved = leg.backend.capability.lookup_moves_data
        projected = pace.costs.load_seconds(size, pace.inflight_bytes, moved=moved) if pace.costs is not None else 0.0
        attempt = Attempt(
            backend=leg.backend,
            number=sum(1 for a in state.attempts if a.backend is leg.backend) + 1,
            span_id=new_id(64, self.rng),
            start=now,
            tokens=tokens,
            asynchronous=asynchronous,
            inflight=pace.inflight + 1,
            blocks=blocks,
            local_tokens=leg.local,
        )
        state.attempts.append(attempt)
        self._loading[state.internal_id] = (state, attempt)
        pace.begin(attempt.span_id, now, projected, size)
        if self.tally is not None:
            self.tally.begun()
        return attempt

    def scheduled(self, request_ids: Iterable[str], running: int) -> None:
        """New requests entered a step, in which `running` requests run; their first token is watched for."""
        self.running = running
        now = 0
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is None or state.scheduled:
                continue
            now = now or self.clock()
            state.scheduled = now
            self._unscheduled -= 1
            self._prefilling[request_id] = state

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Asynchronous loads ended on all ranks."""
        now = 0
        for request_id in request_ids:
            entry = self._loading.get(request_id)
            if entry is not None and entry[1].asynchronous:
                now = now or self.clock()
                self._end_attempt(*entry, now)

    def loaded_batch(self, batch: int, end: int) -> None:
        """The synchronous loads of one step ended, `end` on this process's monotonic clock."""
        for state, attempt in list(self._loading.values()):
            if attempt.batch == batch:
                self._end_attempt(state, attempt, max(attempt.start, min(end, self.clock())))

    def failed(self, request_ids: Iterable[str], error: str) -> None:
        """Loads failed as a whole; their end is heard separately."""
        for request_id in request_ids:
            entry = self._loading.get(request_id)
            if entry is not None:
                entry[1].failed = True
                entry[1].error = error
                entry[0].load_failed = True

    def failed_blocks(self, block_ids: set[int]) -> None:
        """Blocks could not be loaded: marks the open attempts that wait for them and counts what is good before."""
        for state, attempt in self._loading.values():
            bad = _first_bad(attempt, block_ids)
            if bad is None:
                continue
            good = max(0, bad * attempt.backend.block_tokens - attempt.local_tokens)
            attempt.loaded = min(good, attempt.loaded if attempt.failed else good, attempt.tokens)
            attempt.failed = True
            attempt.error = "blocks"
            state.load_failed = True

    def outputs(self) -> None:
        """A step's output was processed: tells the requests that now have their first token; sweeps now and then."""
        if self._prefilling:
            for request_id, state in list(self._prefilling.items()):
                if state.request.num_output_tokens > 0:
                    self._first_token(request_id, state)
        now = self.clock()
        if now - self._swept > _SWEEP_NS:
            self._swept = now
            self._sweep(now)

    def finished(self, request: Any) -> RequestState | None:
        """A request ended, with or without tokens. Called by every child; the first call counts."""
        request_id: str = request.request_id
        state = self._requests.get(request_id)
        if state is None or state.finish:
            return None
        tokens = request.num_output_tokens
        name = getattr(getattr(request, "status", None), "name", "")
        if name.endswith("ERROR"):
            state.error = name.lower()
        if tokens > 0:
            self._first_token(request_id, state)
        state.finish = self.clock()
        state.output_tokens = tokens
        self._leaves(state, False)
        self._lookups_over(state)
        self.expect(state, 0)
        if not state.scheduled:
            self._unscheduled -= 1
        if not state.told:
            self._tell(state, state.finish)
        if state.first:
            self._recorder.append(DecodeRecord(state, self.scope))
        self._prefilling.pop(request_id, None)
        entry = self._loading.get(request_id)
        if entry is not None and not entry[1].asynchronous:
            if state.error and not entry[1].failed:  # kv_load_failure_policy "fail" ends it before its step reports
                entry[1].failed, entry[1].error = True, state.error
            self._end_attempt(*entry, state.finish)  # its step is over or will never report
        del self._requests[request_id]
        state.request = None  # the ring must not keep prompts alive
        return state

    def _first_token(self, request_id: str, state: RequestState) -> None:
        self._prefilling.pop(request_id, None)
        if state.first:
            return
        state.first = self.clock()
        self.expect(state, 0)
        entry = self._loading.get(request_id)
        if entry is not None and not entry[1].asynchronous:
            self._end_attempt(*entry, max(entry[1].start, min(state.scheduled or state.first, state.first)))
        self._tell(state, state.first)

    def _tell(self, state: RequestState, end: int) -> None:
        state.told = True
        done = tuple(a for a in state.attempts if a.end)
        for attempt in done:
            attempt.told = True
        still = tuple(a for a in state.attempts if not a.end)
        self._recorder.append(RequestRecord(state, self.scope, done, still, end))
        if self.tally is not None:
            self.tally.decided(state.decided()[0])

    def _end_attempt(self, state: RequestState, attempt: Attempt, now: int) -> None:
        self._loading.pop(state.internal_id, None)
        attempt.end = now
        attempt.blocks = None
        if attempt.failed and self.tally is not None:
            self.tally.failed()
        if not attempt.failed:
            attempt.loaded = attempt.tokens
        pace = self.pace(attempt.backend)
        if attempt.backend.capability.lookup_moves_data and not attempt.failed:
            pace.forget(attempt.span_id)  # the data came with the lookup: this says nothing about the link
        else:
            pace.end(attempt.span_id, now, ok=not attempt.failed)
        self._leaves(state, False)
        if not state.first and not state.finish:
            self.expect(state, max(state.prompt_tokens - attempt.local_tokens - attempt.loaded, 1))
        if state.told and not attempt.told:
            attempt.told = True
            self._recorder.append(FetchRecord(state, attempt, self.scope))

    def _sweep(self, now: int) -> None:
        for state, attempt in list(self._loading.values()):
            if state.finish and now - state.finish > ORPHAN_NS:
                attempt.failed = True
                attempt.error = "lost"
                self._end_attempt(state, attempt, now)

    def _forget(self, request_id: str) -> None:
        state = self._requests.pop(request_id)
        self._prefilling.pop(request_id, None)
        entry = self._loading.pop(request_id, None)
        if entry is not None:
            self.pace(entry[1].backend).forget(entry[1].span_id)
        self._leaves(state, False)
        self._lookups_over(state)
        self.expect(state, 0)
        if not state.scheduled:
            self._unscheduled -= 1

    def _lookups_over(self, state: RequestState) -> None:
        for leg in state.legs.values():
            if leg.reading:
                leg.reading = False
                self.pace(leg.backend).forget(leg.span_id)


def _first_bad(attempt: Attempt, block_ids: set[int]) -> int | None:
    """Index of the first block of an attempt that is among the failed ones. One KV cache group, as vLLM requires."""
    if attempt.blocks is None:
        return None
    groups = attempt.blocks.get_block_ids()
    for index, block_id in enumerate(groups[0] if groups else ()):
        if block_id in block_ids:
            return index
    return None
