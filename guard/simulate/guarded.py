"""The real gate between a simulated engine and its remote tier: directives in, decisions out.

As in the hook, a read counts as under way from the start of its lookup to the end of its fetch, and what the engine
sees itself of its reads (`guard.pace`) goes into the gate beside the directive.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from guard import gate, semconv
from guard.classes import class_of
from guard.connectors import Capability
from guard.costs import Costs, Traffic
from guard.gate import Decision
from guard.pace import Pace
from guard.simulate.job import Job
from guard.simulate.policies import World
from guard.wire import Directive

_NS: Final = 1e9


class Leases(Protocol):
    """What the gate needs of `guard.hook.directives.Directives`."""

    def current(self, backend: str) -> Directive | None:
        """The directive in force."""
        ...


class Guarded:
    """Asks `guard.gate` for every request of every engine."""

    def __init__(self, world: World, leases: Sequence[Leases], backend: str, capability: Capability) -> None:
        self._world = world
        self._leases = leases
        self._backend = backend
        self._capability = capability
        self._token_bytes = world.scenario.connector.bytes_per_token
        self.paces = [Pace() for _ in leases]
        self._costs: list[Costs | None] = [None for _ in leases]

    def stores(self, engine: int) -> bool:
        """Whether new KV goes to the store."""
        directive = self._leases[engine].current(self._backend)
        return directive is None or directive.stores or directive.mode == semconv.MODE_OBSERVE

    def lookup(self, now: float, job: Job) -> Decision:
        """The skip gate."""
        directive, pace, at = self._now(now, job)
        job.directive_id = directive.id if directive else ""
        traffic = self._traffic(now, job, pace, at)
        decision = gate.admit_lookup(
            directive, self._capability, prompt_tokens=job.prompt.tokens, local_tokens=job.local,
            token_bytes=self._token_bytes, traffic=traffic, load_failed=job.failed, broken=pace.broken(at),
            trickle_due=_due(directive, pace, at), draw=job.draw,
        )  # fmt: skip
        self._tried(decision, pace, at, job, directive)
        return decision

    def load(self, now: float, job: Job) -> Decision:
        """The load gate."""
        directive, pace, at = self._now(now, job)
        size = job.matched * self._token_bytes
        decision = gate.admit_load(
            directive, self._capability, matched_tokens=job.matched, matched_bytes=size,
            prompt_tokens=job.prompt.tokens, local_tokens=job.local, traffic=self._traffic(now, job, pace, at),
            load_failed=job.failed, broken=pace.broken(at), trickle_due=_due(directive, pace, at),
            trickle=job.skip is not None and job.skip.reason == gate.TRICKLE, draw=job.draw,
        )  # fmt: skip
        self._tried(decision, pace, at, job, directive)
        if not decision.admitted:
            pace.forget(job.number)
        return decision

    def opened(self, now: float, job: Job) -> None:
        """A read has begun with its lookup: what it will find is what its class leads to expect."""
        costs, pace = self._costs[job.engine], self.paces[job.engine]
        projected, size = 0.0, 0
        if costs is not None:
            expected = costs.classes.get(class_of(job.prompt.tokens, job.running)) or costs.classes.get(
                gate.ALL_CLASSES
            )
            tokens = min(expected.tokens if expected else 0.0, job.prompt.tokens - job.local)
            size = int(tokens * self._token_bytes)
            projected = costs.read_seconds(size, pace.inflight_bytes)
        pace.begin(job.number, int(now * _NS), projected, size)
        job.inflight = pace.inflight

    def closed(self, now: float, job: Job, *, ok: bool) -> None:
        """A read is over: with its fetch, or with a lookup that found nothing."""
        costs, pace = self._costs[job.engine], self.paces[job.engine]
        if ok and not job.matched:
            pace.forget(job.number)
            return
        projected = costs.read_seconds(job.matched * self._token_bytes) if costs is not None else None
        pace.end(job.number, int(now * _NS), ok=ok, projected=projected)

    def deadline(self, job: Job) -> float | None:
        """None: a request waits for its read."""
        return None

    def _now(self, now: float, job: Job) -> tuple[Directive | None, Pace, int]:
        directive, pace, at = self._leases[job.engine].current(self._backend), self.paces[job.engine], int(now * _NS)
        costs = directive.costs if directive is not None else None
        if costs is not self._costs[job.engine]:
            self._costs[job.engine] = costs
            pace.learn(costs)
        pace.age_out(at)
        return directive, pace, at

    def _traffic(self, now: float, job: Job, pace: Pace, at: int) -> Traffic:
        engine = self._world.engines[job.engine]
        return Traffic(
            inflight=pace.inflight, inflight_bytes=pace.inflight_bytes, running=engine.batch.running,
            waiting=max(0, engine.waiting - 1), backlog_tokens=engine.batch.backlog_tokens(), elapsed=now - job.arrival,
            slowdown=pace.slowdown(at), overdue=pace.overdue(at),
        )  # fmt: skip

    def _tried(self, decision: Decision, pace: Pace, at: int, job: Job, directive: Directive | None) -> None:
        if decision.reason == gate.TRICKLE:
            pace.last_trickle = at
        elif decision.reason == gate.HOLDOUT and directive is not None:
            job.propensity = directive.reads.holdout


def _due(directive: Directive | None, pace: Pace, at: int) -> bool:
    return directive is not None and pace.trickle_due(at, directive.reads.trickle_seconds)
