"""The policy `auto`: the real estimator, controller and gate, fed as the service feeds them, on the simulation's clock.

What a real deployment knows late is known late here: records arrive with the exporter's delay, directives with the
poll's, the RTT by a probe once a second, reads in flight as the hook last told them. The probe sees the link, not what
is wrong with one engine. Nothing else is told: no queue, no future, no true cost.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, Final

from guard.control.controller import decide
from guard.control.pool import Pool, member, shared
from guard.control.projection import costs_of, headroom
from guard.control.shapes import ALL, BYPASS, HALF_OPEN, OPEN, STATES, Evidence, Plan, Read, State
from guard.correlate.frame import frame
from guard.correlate.window import Window
from guard.estimate.frames import fit
from guard.estimate.shapes import Cell
from guard.gate import TRICKLE
from guard.semconv import OUTCOME_FAILED
from guard.simulate.clock import Schedule
from guard.simulate.guarded import Guarded
from guard.simulate.job import Gates, Job
from guard.simulate.policies import World
from guard.simulate.records import backend, engine_id, record_of
from guard.simulate.scenario import Scenario
from guard.slo.objective import Objective
from guard.wire import Directive, RequestRecord

EXPORT_SECONDS: Final = 1.0
"""From a first token to its record in the service: the hook exports at least once a second."""

POLL_SECONDS: Final = 0.1
"""From a decision to its directive at the hook: a long poll."""

PROBE_SECONDS: Final = 1.0
PROBE_NOISE: Final = 0.05
MIX_SECONDS: Final = 60.0
WINDOW: Final = 4096
_EVERYBODY: Final = -1  # no engine's number: what is wrong with one engine is not seen


class Lease:
    """The directive of one engine."""

    def __init__(self) -> None:
        self.directive: Directive | None = None

    def current(self, backend: str) -> Directive | None:  # noqa: ARG002  there is one
        """The directive in force."""
        return self.directive


class Auto:
    """Service and hooks of all engines. `known` are records from before, so that it does not begin without a model."""

    def __init__(self, scenario: Scenario, known: Iterable[RequestRecord] = ()) -> None:
        self.scenario = scenario
        long = scenario.seconds > 900.0 and math.isfinite(scenario.seconds)
        self._tick = 1.0 if long else 0.25
        self._refit = 30.0 if long else 5.0
        self._backend = backend(scenario)
        numbers = range(scenario.engine.count)
        self._leases = [Lease() for _ in numbers]
        self._states = [State() for _ in numbers]
        self._plans: list[Plan | None] = [None for _ in numbers]
        self._healed = [-math.inf for _ in numbers]
        self._reads: list[list[Read]] = [[] for _ in numbers]
        self._told: deque[tuple[float, RequestRecord]] = deque()
        self.window = Window(max_records=WINDOW, max_seconds=3600.0)
        for record in known:
            self.window.add(record)
        self._cells: dict[str, Cell] = {}
        self._pool = Pool()
        self._rtt: float | None = None
        self._reachable: bool | None = None
        self._recent: deque[tuple[float, str, int]] = deque()
        self._waits: deque[tuple[float, float, int, int]] = deque()
        self._inflight = [(0, 0, 0.0) for _ in numbers]
        self._rng = random.Random(f"{scenario.seed}/probe")  # noqa: S311
        self._seconds: dict[str, float] = dict.fromkeys(STATES, 0.0)
        self.changes: list[tuple[float, int, str, str]] = []
        self._directives = 0
        goal = scenario.objective
        self._objective = Objective(ttft_seconds=goal.ttft, percentile=goal.percentile, tpot_seconds=goal.tpot)

    def gates(self, world: World, schedule: Schedule) -> Gates:
        """Begins to observe; returns the gates of all engines."""
        self._world, self._schedule = world, schedule
        self._guarded = Guarded(world, self._leases, self._backend, self.scenario.connector.capability)
        schedule.at(0.0, self._probe)
        schedule.at(0.0 if len(self.window) else self._refit, self._fit)
        schedule.at(0.0, self._step)
        return self._guarded

    def first(self, now: float, job: Job) -> None:
        """The hook has a record."""
        self._told.append((now + EXPORT_SECONDS, record_of(job, self.scenario, now)))

    def stored(self, now: float, job: Job, tokens: int, seconds: float) -> None:
        """Nothing to learn from."""

    def finished(self, now: float, job: Job) -> None:
        """Nothing to learn from."""

    def observed(self) -> list[RequestRecord]:
        """The records that nobody has looked at yet."""
        return [record for _, record in self._told]

    def states(self) -> Mapping[str, float]:
        """Share of the engines' time in each state."""
        total = sum(self._seconds.values())
        return {name: seconds / total for name, seconds in self._seconds.items() if seconds} if total else {}

    def inflight(self, now: float) -> int:
        """Reads that count as under way at `now`; those that never end must have aged out, the others have ended."""
        for pace in self._guarded.paces:
            if any(change.hang for change in self.scenario.link.change):
                pace.age_out(int(now * 1e9))
        return sum(pace.inflight for pace in self._guarded.paces)

    def _again(self, now: float, seconds: float, step: Any) -> None:
        if self._world.busy(now):
            self._schedule.at(now + seconds, step)

    def _probe(self, now: float) -> None:
        condition = self._world.link.condition(now, _EVERYBODY)
        self._reachable = condition.loss < 1.0
        if self._reachable:
            self._rtt = condition.rtt * self._rng.lognormvariate(0.0, PROBE_NOISE)
        for number, pace in enumerate(self._guarded.paces):
            at = int(now * 1e9)
            pace.age_out(at)
            self._inflight[number] = (pace.inflight, pace.inflight_bytes, pace.oldest_age(at))
        self._again(now, PROBE_SECONDS, self._probe)

    def _fit(self, now: float) -> None:
        cells = fit(frame(self.window)) if len(self.window) else []
        self._cells = {cell.class_: cell for cell in cells if cell.backend == self._backend}
        self._again(now, self._refit, self._fit)

    def _step(self, now: float) -> None:
        while self._told and self._told[0][0] <= now:
            self._take(now, self._told.popleft()[1])
        while self._recent and self._recent[0][0] < now - MIX_SECONDS:
            self._recent.popleft()
        while self._waits and self._waits[0][0] < now - MIX_SECONDS:
            self._waits.popleft()
        parts = self._share(now)
        for number in range(len(self._states)):
            self._decide(now, number, parts.get(str(number)))
        self._again(now, self._tick, self._step)

    def _share(self, now: float) -> dict[str, int]:
        """Every engine's part of the link, as the service splits it."""
        costs = [costs_of(plan.coefficients) if plan and plan.coefficients.fetch else None for plan in self._plans]
        want = {engine for _, _, engine in self._recent}
        waiting = [self._waiting(number) for number in range(len(self._plans))]
        members = {
            str(number): member(
                reads,
                costs[number],
                self._inflight[number][0],
                stopped=state.name == BYPASS,
                wants=number in want,
                waiting=waiting[number],
            )
            for number, (reads, state) in enumerate(zip(self._reads, self._states, strict=True))
        }
        self._pool, parts = shared(self._pool, members, headroom(self._cells.get(ALL), fmean(waiting)), now)
        return parts

    def _waiting(self, number: int) -> float:
        """Requests that have waited for an engine's GPU of late, as the service reckons them."""
        if not self.scenario.connector.capability.aside:
            return 0.0
        own = [(seconds, met) for _, seconds, met, engine in self._waits if engine == number]
        return min(sum(seconds for seconds, _ in own) / MIX_SECONDS, fmean(met for _, met in own)) if own else 0.0

    def _take(self, now: float, record: RequestRecord) -> None:
        self.window.add(record)
        number = int(record.internal_id.partition("-")[0])
        self._waits.append((now, record.gpu_seconds, record.waiting, number))
        if record.prompt_tokens - record.tokens_local > self.scenario.connector.chunk_tokens:
            self._recent.append((now, record.class_, number))
        failed = any(each.outcome == OUTCOME_FAILED for each in record.fetches)
        if record.fetches or (record.decision == "decline" and failed):
            self._reads[number].append(
                Read(
                    at=now - EXPORT_SECONDS - record.prefill - record.resume, seconds=record.lookup + record.fetch,
                    prompt_tokens=record.prompt_tokens, local_tokens=record.tokens_local,
                    loaded_tokens=record.tokens_loaded, bytes=self._sent(record),
                    inflight=record.fetches[0].inflight if record.fetches else 1, running=record.running,
                    rtt=record.rtt, ok=not failed, tagged=record.reason == TRICKLE,
                )
            )  # fmt: skip

    def _sent(self, record: RequestRecord) -> float:
        """Bytes that the store sent, as the service reckons it."""
        found = float(sum(each.bytes for each in record.fetches))
        connector = self.scenario.connector
        if connector.capability.lookup_moves_data:
            found += record.tokens_local * connector.bytes_per_token
        return found

    def _decide(self, now: float, number: int, part: int | None) -> None:
        inflight, size, oldest = self._inflight[number]
        seconds = min(MIX_SECONDS, max(now, self._tick))
        mix = Counter(class_ for _, class_, engine in self._recent if engine == number)
        reads, self._reads[number] = self._reads[number], []
        evidence = Evidence(
            cells=self._cells, objective=self._objective, rtt=self._rtt, reachable=self._reachable, inflight=inflight,
            inflight_bytes=size, oldest_age=oldest, reads=reads,
            members=len(self._states), max_inflight=part, mix={name: n / seconds for name, n in mix.items()},
            peers_healed=max((at for other, at in enumerate(self._healed) if other != number), default=-math.inf),
            waiting=self._waiting(number),
            sharing_bytes=float(sum(each[1] for other, each in enumerate(self._inflight) if other != number)),
        )  # fmt: skip
        state = self._states[number]
        before, (state, plan) = state.name, decide(state, evidence, now)
        self._states[number] = state
        self._seconds[plan.state] += self._tick
        if state.name != before:
            self.changes.append((now, number, state.name, plan.reason))
            if (before, state.name) == (HALF_OPEN, OPEN):
                self._healed[number] = now
        held = self._plans[number]
        if held is None or (held.state, held.reads, held.coefficients) != (plan.state, plan.reads, plan.coefficients):
            self._plans[number] = plan
            self._directives += 1
            directive = plan.directive(
                id=f"{number}-{self._directives}", engine_id=engine_id(number), backend=self._backend
            )
            wait = POLL_SECONDS if held is not None else 0.0  # requests do not come before the first poll's answer
            self._schedule.at(now + wait, lambda _at: setattr(self._leases[number], "directive", directive))
