"""One simulated engine: intake, caches, the road to the remote tier as its connector takes it, and the batcher.

What the connector does is what its entry in `guard.connectors` says: LMCache's multi-process connector pulls the data
in its lookup, ahead of scheduling; the in-process one looks up and loads inside the engine's loop and holds the whole
batch up; a Mooncake store's lookup blocks, its load does not.
"""

import math
import random
from collections import deque

from guard.connectors import LOAD_SYNC
from guard.simulate.batch import Batcher, Then
from guard.simulate.cache import BlockCache
from guard.simulate.clock import Schedule
from guard.simulate.job import Gates, Job, Prompt, Sink
from guard.simulate.link import Link
from guard.simulate.reads import Lanes, Operation
from guard.simulate.scenario import Scenario


class Engine:
    """Everything that happens to the requests of one engine. Seeded; all time comes from the schedule."""

    def __init__(
        self,
        number: int,
        scenario: Scenario,
        *,
        schedule: Schedule,
        link: Link,
        store: BlockCache,
        gates: Gates,
        sink: Sink,
        rng: random.Random,
    ) -> None:
        self.number = number
        self.capability = scenario.connector.capability
        self._scenario = scenario
        self._connector = scenario.connector
        self._schedule = schedule
        self._link = link
        self._store = store
        self._gates = gates
        self._sink = sink
        self._rng = rng
        self._chunk = scenario.connector.chunk_tokens
        self._local = BlockCache(scenario.engine.local_tokens // self._chunk)
        self._slots: deque[Job] = deque()  # match known, KV blocks not yet free
        self._count = 0
        self._batches = 0
        self.batch = Batcher(scenario.engine, schedule, self, rng)
        self.lanes = Lanes(
            number, link, schedule, readers=scenario.connector.readers, timeout=scenario.connector.timeout
        )
        self.waiting = 0
        self.loading = 0  # of those: their asynchronous load is under way

    def arrive(self, now: float, prompt: Prompt) -> Job:
        """A request comes in."""
        self._count += 1
        rng = self._rng
        job = Job(self._count, prompt, self.number, now, rng.random())
        job.running, job.waiting = self.batch.running, self.waiting
        self.waiting += 1
        job.seen = now + self._scenario.engine.intake_seconds * rng.lognormvariate(0.0, 0.2)
        self._schedule.at(job.seen, lambda at: self._seen(at, job))
        if self._scenario.abort and rng.random() < self._scenario.abort:
            self._schedule.at(job.seen + rng.expovariate(4.0), lambda at: self._abort(at, job))
        self._schedule.at(now + self._scenario.patience, lambda at: self._abort(at, job))
        return job

    def peek(self, job: Job) -> int:
        """Tokens that the store holds of a request now, beyond what is local."""
        return max(0, self._usable(job, job.prompt.hits[1] if job.prompt.hits else self._in_store(job)) - job.local)

    def remote_seconds(self, now: float, job: Job, tokens: int) -> float:
        """Seconds that reading `tokens` would take from now on, if nobody else came: for the clairvoyant policy."""
        connector = self._connector
        chunks = job.prompt.tokens // self._chunk
        trips = connector.lookup_trips * chunks + connector.fetch_trips * (tokens // self._chunk)
        size = tokens * connector.bytes_per_token
        ready = math.inf if self._link.hangs(now, self.number) else self._link.ready(now, self.number)
        if math.isinf(ready):
            return ready
        condition = self._link.condition(ready, self.number)
        own = connector.lookup_seconds + connector.fetch_seconds + trips * condition.rtt
        queued = self.lanes.queued_seconds(condition.rtt) + self._link.queued(now)
        return ready - now + own + self._link.seconds(size, condition) + queued

    def worth_seconds(self, job: Job, tokens: int) -> float:
        """What a read of `tokens` may take before recomputing is quicker: the prefill saved and the queue ahead."""
        spec, left = self._scenario.engine, job.prompt.tokens - job.local
        after = left - tokens
        attention = left * (job.prompt.tokens - left / 2) - after * (job.prompt.tokens - after / 2)
        saved = spec.token_seconds * tokens + spec.attention_seconds * attention
        return saved if self.capability.load == LOAD_SYNC else saved + self.batch.backlog()

    # -- the road to the remote tier ---------------------------------------------------------------------------------

    def _seen(self, now: float, job: Job) -> None:
        if self.capability.lookup_blocks:
            self.batch.ready(now, job)
        else:
            if self._refused(now, job):
                self.batch.ready(now, job)
            else:
                self._look_up(now, job, lambda at: self._answered(at, job))

    def _refused(self, now: float, job: Job) -> bool:
        """The skip gate."""
        job.asked = True
        self._match_local(job)
        job.skip = self._gates.lookup(now, job)
        return not job.skip.admitted

    def _look_up(self, now: float, job: Job, then: Then) -> None:
        connector = self._connector
        job.lookup_start = now
        job.rtt = self._link.condition(now, self.number).rtt
        chunks = job.prompt.tokens // self._chunk
        job.found = self._usable(job, job.prompt.hits[1] if job.prompt.hits else self._in_store(job))
        trips, size = connector.lookup_trips * chunks, 0
        if self.capability.lookup_moves_data:
            trips += connector.fetch_trips * (job.found // self._chunk)
            size = job.found * connector.bytes_per_token
        job.lookup_trips, job.moved_bytes = trips, size
        self._gates.opened(now, job, fetch=False)
        limit = self._gates.deadline(job)
        if limit is not None and not self.capability.lookup_blocks:
            self._schedule.at(now + limit, lambda at: self._give_up(at, job))

        def done(at: float, ok: bool) -> None:
            if not job.gave_up:
                job.lookup_end = at
                job.failed = job.failed or not ok
                job.matched = max(0, job.found - job.local) if ok else 0
            self._gates.closed(at, job, fetch=False, ok=ok)
            if not job.gave_up:
                then(at)

        pieces = chunks if size else 1
        self.lanes.start(now, Operation(connector.lookup_seconds, trips, size, pieces, done))

    def _answered(self, now: float, job: Job) -> None:
        """The load gate, and the load when it lets the request through and is asynchronous."""
        if job.aborted:
            return
        if job.matched:
            job.load = self._gates.load(now, job)
        if self._waits(job):
            self._slots.append(job)
            self._allocate(now)
        else:
            self.batch.ready(now, job)

    def _waits(self, job: Job) -> bool:
        """Whether it waits for a load outside the engine's loop."""
        return job.load is not None and job.load.admitted and not job.usable and self.capability.load != LOAD_SYNC

    def _allocate(self, now: float) -> None:
        """KV blocks for those whose match is known, in the order in which they came."""
        while self._slots and (self._slots[0].aborted or self._slots[0].gave_up or self.batch.fits(self._slots[0])):
            job = self._slots.popleft()
            if job.aborted or job.gave_up:
                continue
            self.batch.allocate(job)
            job.alloc = now
            self.loading += 1
            self._fetch(now, job, lambda at, each=job: self._loaded(at, each))  # type: ignore[misc]

    def _loaded(self, now: float, job: Job) -> None:
        self.loading -= 1
        if job.aborted:
            self.batch.free(job)
            self._allocate(now)
        elif not job.gave_up:
            self.batch.ready(now, job)

    def _fetch(self, now: float, job: Job, then: Then) -> None:
        connector = self._connector
        job.fetch_start = now
        moved = self.capability.lookup_moves_data
        chunks = job.matched // self._chunk
        job.fetch_trips = 0.0 if moved else connector.fetch_trips * chunks
        job.fetch_bytes = job.matched * connector.bytes_per_token
        size = 0 if moved else job.fetch_bytes
        job.moved_bytes += size
        self._gates.opened(now, job, fetch=True)

        def done(at: float, ok: bool) -> None:
            job.fetch_end = at
            job.failed = job.failed or not ok
            self._gates.closed(at, job, fetch=True, ok=ok)
            if not job.gave_up:
                job.loaded = job.matched if ok else 0
                job.usable = at
            then(at)

        operation = Operation(connector.fetch_seconds, job.fetch_trips, size, chunks, done)
        operation.broken = connector.failures > 0 and self._rng.random() < connector.failures
        self.lanes.start(now, operation)

    def _give_up(self, now: float, job: Job) -> None:
        """A fixed deadline: the request is computed, its read goes on for nothing."""
        if not (job.usable or job.scheduled or job.aborted) and (job.load is None or job.load.admitted):
            if job.lookup_end and not job.matched:
                return
            job.gave_up = True
            job.lookup_end = job.lookup_end or now
            job.usable = now
            self.batch.ready(now, job)

    # -- what the batcher asks ---------------------------------------------------------------------------------------

    def admit(self, now: float, job: Job, then: Then) -> bool:
        """A lookup inside the engine's loop."""

        def answered(at: float) -> None:
            if job.matched and not job.aborted:
                job.load = self._gates.load(at, job)
            then(at)

        if self._refused(now, job):
            return True
        self._look_up(now, job, answered)
        return False

    def schedulable(self, now: float, job: Job) -> bool:
        """Knows its local match, or goes to wait for its load."""
        if self._waits(job):
            self._slots.append(job)
            self._allocate(now)
            return False
        if not job.loaded and not self.loads(job):
            self._match_local(job)
        job.alloc = job.alloc or now
        job.position = job.local + job.loaded
        return True

    def loads(self, job: Job) -> bool:
        """Whether it loads inside the engine's loop."""
        return job.load is not None and job.load.admitted and self.capability.load == LOAD_SYNC

    def load(self, now: float, job: Job, then: Then) -> None:
        """Its part of a synchronous load."""
        self._fetch(now, job, then)

    def loaded(self, now: float, jobs: list[Job]) -> None:
        """The engine goes on when the last load of its step has ended: each was that long, as the hook tells it."""
        self._batches += 1
        for job in jobs:
            job.fetch_start, job.fetch_end, job.usable, job.batch = job.alloc, now, now, self._batches
            job.position = job.local + job.loaded
            if job.aborted:
                self.batch.free(job)

    def first(self, now: float, job: Job) -> None:
        """The first token: caches know the prompt, and the sink the request."""
        self.waiting -= 1
        self._local.put(job.prompt.blocks)
        self._sink.first(now, job)
        new = self._store.put(job.prompt.blocks) * self._chunk if self._gates.stores(self.number) else 0
        if new:
            condition = self._link.condition(now, self.number)
            size = new * self._connector.bytes_per_token
            self._sink.stored(now, job, new, condition.rtt + self._link.seconds(size, condition))

    def finished(self, now: float, job: Job) -> None:
        """The last token."""
        self._allocate(now)
        self._sink.finished(now, job)

    def _abort(self, now: float, job: Job) -> None:
        if job.first or job.aborted:
            return
        job.aborted = now
        self.waiting -= 1
        if not job.fetch_start or job.fetch_end:  # a load under way goes on, and keeps its blocks
            self.batch.free(job)
            self._allocate(now)
        self._sink.first(now, job)
        self._sink.finished(now, job)

    # -- caches ------------------------------------------------------------------------------------------------------

    def _match_local(self, job: Job) -> None:
        held = job.prompt.hits[0] if job.prompt.hits else self._local.matched(job.prompt.blocks) * self._chunk
        job.local = self._usable(job, held)

    def _in_store(self, job: Job) -> int:
        return self._store.matched(job.prompt.blocks) * self._chunk

    def _usable(self, job: Job, tokens: int) -> int:
        """Never all of a prompt: its last token must be computed."""
        return min(tokens, (job.prompt.tokens - 1) // self._chunk * self._chunk)
