"""Continuous batching with chunked prefill: the scheduler and the accelerator of one simulated engine.

Every step computes one token of each decoding sequence and, with what is left of the token budget, chunks of prompts:
those under way first, then waiting ones in the order of arrival while sequences and KV blocks are free.

    step = step_seconds + sum over chunks (token_seconds*c + attention_seconds*c*(position + c/2))
           + decode_seconds*decoding

so that an idle engine's prefill is a + b*c + d*c*(n - c/2) (design, section 4). Steps that only decode are run in one
go until something happens. Work that a synchronous connector does inside a step holds all of the step up.
"""

import heapq
import math
import random
from collections.abc import Callable
from typing import Final, Protocol

from guard.simulate.clock import Schedule
from guard.simulate.job import Job
from guard.simulate.scenario import Engines

Then = Callable[[float], None]

_LOADED: Final = 10**9
"""Whoever holds KV blocks already goes first: it could not be passed by one that waits for blocks."""


class Blocking(Protocol):
    """What happens to a request inside the engine's own loop."""

    def admit(self, now: float, job: Job, then: Then) -> bool:
        """Called before a request is scheduled for the first time: False when the scheduler must wait for `then`."""
        ...

    def schedulable(self, now: float, job: Job) -> bool:
        """Called when it is scheduled: False when it now waits for an asynchronous load instead."""
        ...

    def loads(self, job: Job) -> bool:
        """Whether its first step begins with a load that holds the step up."""
        ...

    def load(self, now: float, job: Job, then: Then) -> None:
        """That load; calls `then` when the step may go on."""
        ...

    def loaded(self, now: float, jobs: list[Job]) -> None:
        """All loads of a step are over."""
        ...

    def first(self, now: float, job: Job) -> None:
        """Its first token is there."""
        ...

    def finished(self, now: float, job: Job) -> None:
        """Its last token is there."""
        ...


class Batcher:
    """One engine's steps."""

    def __init__(self, spec: Engines, schedule: Schedule, owner: Blocking, rng: random.Random) -> None:
        self._spec = spec
        self._schedule = schedule
        self._owner = owner
        self._rng = rng
        self._waiting: list[tuple[int, Job]] = []
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []
        self._steps = 0
        self._busy = False
        self._idle_run: tuple[float, float, int] | None = None  # start, seconds per step, its number
        self._runs = 0
        self._chunks: list[tuple[Job, int]] = []
        self._new: list[Job] = []
        self._budget = 0
        self.kv_used = 0

    @property
    def running(self) -> int:
        """Sequences that are being computed."""
        return len(self._prefilling) + len(self._decoding)

    def backlog_tokens(self) -> int:
        """Tokens that wait or are under way."""
        jobs = [*self._prefilling, *(job for _, job in self._waiting)]
        return sum(job.prompt.tokens - max(job.position, job.local + job.loaded) for job in jobs)

    def backlog(self) -> float:
        """Seconds of prefill that waits or is under way."""
        return sum(self.alone(job) for _, job in self._waiting) + sum(self.alone(job) for job in self._prefilling)

    def alone(self, job: Job) -> float:
        """Seconds of prefill that a request still needs on an idle engine."""
        spec = self._spec
        left = job.prompt.tokens - max(job.position, job.local)
        return spec.token_seconds * left + spec.attention_seconds * left * (job.prompt.tokens - left / 2)

    def fits(self, job: Job) -> bool:
        """Whether KV blocks for the whole request are free; one that is too large gets an idle engine."""
        need = job.prompt.tokens + job.prompt.output
        return job.kv > 0 or not self.kv_used or self.kv_used + need <= self._spec.kv_tokens

    def allocate(self, job: Job) -> None:
        """Takes KV blocks for the whole request, once."""
        if not job.kv:
            job.kv = job.prompt.tokens + job.prompt.output
            self.kv_used += job.kv

    def free(self, job: Job) -> None:
        """Gives its KV blocks back."""
        self.kv_used -= job.kv
        job.kv = 0

    def ready(self, now: float, job: Job) -> None:
        """A request can be scheduled."""
        heapq.heappush(self._waiting, (job.number - _LOADED if job.kv else job.number, job))
        self.wake(now)

    def wake(self, now: float) -> None:
        """Something changed: begins a step, or ends a run of decode-only steps at the next step's edge."""
        if not self._busy:
            self._step(now)
        elif self._idle_run is not None:
            start, each, count = self._idle_run
            done = min(count, math.floor((now - start) / each) + 1)
            self._idle_run = None
            self._runs += 1
            number = self._runs
            self._schedule.at(max(now, start + done * each), lambda at: self._decoded(at, done, number))

    def _step(self, now: float) -> None:
        if not (self._waiting or self._prefilling or self._decoding):
            return
        self._busy = True
        self._chunks = []
        self._new = []
        self._budget = max(1, self._spec.max_batched_tokens - len(self._decoding))
        for job in self._prefilling:
            self._take(job)
        self._fill(now)

    def _take(self, job: Job) -> None:
        chunk = min(self._budget, job.prompt.tokens - job.position)
        if chunk > 0:
            self._budget -= chunk
            self._chunks.append((job, chunk))

    def _fill(self, now: float) -> None:
        while self._waiting and self._budget > 0 and self.running < self._spec.max_seqs:
            job = self._waiting[0][1]
            if job.aborted:
                heapq.heappop(self._waiting)
                continue
            if not self.fits(job):
                break
            heapq.heappop(self._waiting)
            if not job.asked and not self._owner.admit(now, job, lambda at, each=job: self._admitted(at, each)):  # type: ignore[misc]
                return
            self._schedule_first(now, job)
        self._load(now, 0)

    def _admitted(self, now: float, job: Job) -> None:
        if not job.aborted:
            self._schedule_first(now, job)
        self._fill(now)

    def _schedule_first(self, now: float, job: Job) -> None:
        if not self._owner.schedulable(now, job):
            return
        self.allocate(job)
        job.scheduled = now
        self._prefilling.append(job)
        self._take(job)
        if self._owner.loads(job):
            self._new.append(job)

    def _load(self, now: float, number: int) -> None:
        if number < len(self._new):
            self._owner.load(now, self._new[number], lambda at: self._load(at, number + 1))
            return
        if self._new:
            self._owner.loaded(now, self._new)
        if self._chunks:
            self._compute(now)
        elif self._decoding:
            self._decode_only(now)
        else:
            self._busy = False

    def _compute(self, now: float) -> None:
        spec = self._spec
        seconds = spec.step_seconds + spec.decode_seconds * len(self._decoding)
        chunks = [(job, min(chunk, job.prompt.tokens - job.position)) for job, chunk in self._chunks]
        for job, chunk in chunks:
            seconds += spec.token_seconds * chunk + spec.attention_seconds * chunk * (job.position + chunk / 2)
        self._schedule.at(now + seconds * self._noise(), lambda at: self._computed(at, chunks))

    def _computed(self, now: float, chunks: list[tuple[Job, int]]) -> None:
        self._steps += 1
        for job, chunk in chunks:
            job.position += chunk
            job.computed += chunk
            if job.position >= job.prompt.tokens:
                self._prefilling.remove(job)
                if job.aborted:
                    continue
                job.first = now
                job.finish_step = self._steps + job.prompt.output - 1
                heapq.heappush(self._decoding, (job.finish_step, job.number, job))
                self._owner.first(now, job)
        self._end(now)

    def _decode_only(self, now: float) -> None:
        spec = self._spec
        each = (spec.step_seconds + spec.decode_seconds * len(self._decoding)) * self._noise()
        count = max(1, self._decoding[0][0] - self._steps)
        self._idle_run = (now, each, count)
        self._runs += 1
        number = self._runs
        self._schedule.at(now + count * each, lambda at: self._decoded(at, count, number))

    def _decoded(self, now: float, steps: int, number: int) -> None:
        if number != self._runs:
            return
        self._idle_run = None
        self._steps += steps
        self._end(now)

    def _end(self, now: float) -> None:
        while self._decoding and self._decoding[0][0] <= self._steps:
            job = heapq.heappop(self._decoding)[2]
            job.finish = now
            self.free(job)
            self._owner.finished(now, job)
        self._busy = False
        self._step(now)

    def _noise(self) -> float:
        return self._rng.lognormvariate(0.0, self._spec.noise) if self._spec.noise else 1.0
