"""The real gate between a simulated engine and its remote tier: directives in, decisions out.

What the engine sees itself of its reads (`guard.pace`) goes into the gate beside the directive, as in the hook.
"""

import json
from collections.abc import Sequence
from typing import Final, Protocol

from guard import gate, semconv
from guard.connectors import Capability
from guard.costs import Traffic
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
        if decision.reason == gate.TRICKLE:
            job.trickled, pace.last_trickle = pace.last_trickle, at
        self._decided(job, directive, decision)
        return decision

    def load(self, now: float, job: Job) -> Decision:
        """The load gate."""
        directive, pace, at = self._now(now, job)
        size = job.matched * self._token_bytes
        decision = gate.admit_load(
            directive, self._capability, matched_tokens=job.matched, matched_bytes=size,
            prompt_tokens=job.prompt.tokens, local_tokens=job.local, traffic=self._traffic(now, job, pace, at),
            load_failed=job.failed, broken=pace.broken(at), trickle_due=_due(directive, pace, at),
            trickle=job.trickled != 0, draw=job.draw,
        )  # fmt: skip
        if decision.reason == gate.TRICKLE and not job.trickled:
            pace.last_trickle = at
        self._decided(job, directive, decision)
        return decision

    def opened(self, now: float, job: Job, *, fetch: bool) -> None:
        """A read is in flight: a fetch, or a lookup that itself moves the data; it should find what is usual."""
        pace = self.paces[job.engine]
        costs, projected, longest = pace.costs, 0.0, 0.0
        if fetch:
            size = job.matched * self._token_bytes
            moved = self._capability.lookup_moves_data
            projected = costs.load_seconds(size, pace.inflight_bytes, moved=moved) if costs is not None else 0.0
        elif self._capability.lookup_moves_data:
            size = int(costs.typical_tokens * self._token_bytes) if costs is not None else 0
            if costs is not None:
                projected, longest = costs.lookup(size), costs.lookup(job.prompt.tokens * self._token_bytes)
        else:
            return
        pace.begin(2 * job.number + fetch, int(now * _NS), projected, size, longest)
        job.inflight = pace.inflight

    def closed(self, now: float, job: Job, *, fetch: bool, ok: bool) -> None:
        """A read is over, or a lookup, which may have found nothing."""
        pace, at = self.paces[job.engine], int(now * _NS)
        if not fetch:
            if self._capability.lookup_moves_data:
                costs = pace.costs
                moved = job.matched + job.local  # what is held locally is sent, too
                projected = costs.lookup(moved * self._token_bytes) if costs is not None else 0.0
                if job.matched <= 0 and ok:
                    pace.forget(2 * job.number)  # as in the hook: a miss is as long as a step of the engine
                else:
                    pace.end(2 * job.number, at, ok=ok, projected=projected)
            if job.trickled and job.matched <= 0:  # it told nothing: the next may be the trickle
                pace.last_trickle, job.trickled = job.trickled, 0
            return
        if self._capability.lookup_moves_data and ok:
            pace.forget(2 * job.number + 1)  # as in the hook: the data came with the lookup
        else:
            pace.end(2 * job.number + 1, at, ok=ok)

    def reads_in_flight(self, engine: int, now: float) -> str:
        """As the hook tells it: count, bytes and age of the oldest, by backend; empty when nothing is in flight."""
        pace = self.paces[engine]
        try:
            told = [pace.inflight, pace.inflight_bytes, round(pace.oldest_age(int(now * _NS)), 3)]
        except RuntimeError:  # a read began or ended while we looked
            return ""
        return json.dumps({self._backend: told}) if told[0] else ""

    def deadline(self, job: Job) -> float | None:
        """None: a request waits for its read."""
        return None

    def _now(self, now: float, job: Job) -> tuple[Directive | None, Pace, int]:
        directive, pace, at = self._leases[job.engine].current(self._backend), self.paces[job.engine], int(now * _NS)
        costs = directive.costs if directive is not None else None
        if costs is not pace.costs:
            pace.learn(costs)
        pace.age_out(at)
        return directive, pace, at

    def _traffic(self, now: float, job: Job, pace: Pace, at: int) -> Traffic:
        engine = self._world.engines[job.engine]
        inflight, size = pace.flight(at)
        return Traffic(
            inflight=inflight, inflight_bytes=size, running=engine.batch.running,
            waiting=max(0, engine.waiting - engine.loading - 1), backlog_tokens=engine.batch.backlog_tokens(),
            elapsed=now - job.arrival, slowdown=pace.slowdown(at), overdue=pace.overdue(at),
        )  # fmt: skip

    def _decided(self, job: Job, directive: Directive | None, decision: Decision) -> None:
        auto = directive is not None and directive.mode == semconv.MODE_AUTO
        holdout = directive.reads.holdout if directive is not None and auto else 0.0
        if holdout:
            job.propensity = holdout if decision.reason == gate.HOLDOUT else 1.0 - holdout


def _due(directive: Directive | None, pace: Pace, at: int) -> bool:
    return directive is not None and pace.trickle_due(at, directive.reads.trickle_seconds)
