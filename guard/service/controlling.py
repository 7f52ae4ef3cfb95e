"""Runs the controller: evidence in, plans out, per engine and backend, four times a second.

A plan becomes part of the directive where the mode is `auto` or `observe`; `on` and `off` are the operator's word.
State is kept in the ledger and restored at start. Everything runs in the event loop.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from guard import semconv
from guard.control import memory
from guard.control.controller import decide
from guard.control.pool import Member, Pool, member, shared
from guard.control.projection import costs_of, headroom
from guard.control.shapes import ALL, BYPASS, HALF_OPEN, OPEN, Evidence, Plan, State
from guard.costs import Costs
from guard.estimate.shapes import Cell, Verdict
from guard.service.directives import Clock
from guard.service.evidence import Gatherer, Key
from guard.slo.burnrate import Standing, Tally, standing
from guard.slo.objective import Objective, Objectives
from guard.wire import AttributeValue, Event, RequestRecord

IDLE_SECONDS: Final = 1.0
"""An engine of which nothing new is known is looked at this often."""

SAVE_SECONDS: Final = 5.0
ATTAIN_SECONDS: Final = 3.0
"""The objective must be out of reach, or in reach again, for so long before it is told."""

SILENT_LIMIT: Final = 10_000
"""Engines that are silent whose controller's state is remembered."""

CONTROLLER: Final = "controller"
"""Key of the ledger under which the states are kept."""

log = structlog.get_logger("guard.service.controlling")

Link = tuple[float | None, bool | None]
"""Idle RTT of a backend now, seconds, and whether its probes are answered; None: nobody measures."""


@dataclass(slots=True)
class Unit:
    """The controller of one engine and backend, as the service keeps it."""

    state: State
    model: str = ""
    plan: Plan | None = None
    costs: Costs | None = None
    verdict: Verdict = field(default_factory=Verdict)
    decided: float = -math.inf
    link: Link = (None, None)
    since: float | None = None  # Unix time of the last change of state
    healed: float = -math.inf  # when it last opened again because reads paid
    unattainable_since: float | None = None
    attainable: bool = True
    tally: Tally = field(default_factory=Tally)


class Pooled(NamedTuple):
    """What an engine is told of the others that share its backend."""

    members: int
    part: int | None  # of the pool's budget of reads in flight
    sharing_bytes: int  # what the others have in flight
    healed: float  # when one of them last opened again


class Controlling:
    """The controllers of all engines and backends."""

    def __init__(
        self,
        clock: Clock,
        objectives: Callable[[], Objectives],
        *,
        cells: Callable[[], Sequence[Cell]],
        link: Callable[[str], Link],
        publish: Callable[[Event], object],
        count: Callable[..., None],
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self._objectives = objectives
        self.gathered = Gatherer()
        self.units: dict[Key, Unit] = {}
        self._clock = clock
        self._cells, self._link = cells, link
        self._publish, self._count = publish, count
        self._pools: dict[str, Pool] = {}
        self._silent: dict[Key, State] = {}  # of engines that poll no longer, should they come back
        self._failed: set[Key] = set()
        self._fitted: Sequence[Cell] = ()
        self._by_backend: dict[tuple[str, str], dict[str, Cell]] = {}
        self._saved = -math.inf
        self._changed = False
        self._kept = dict((kept or {}).get("units", {}))
        self._kept_pools = dict((kept or {}).get("pools", {}))
        self._down = max(0.0, clock.wall() - float((kept or {}).get("at", clock.wall())))

    @property
    def objectives(self) -> Objectives:
        """Those in force."""
        return self._objectives()

    def take(self, record: RequestRecord) -> None:
        """A request was joined, or amended."""
        now = self._clock.monotonic()
        unit = self.units.get((record.engine_id, record.backend))
        self.gathered.take(record, unit.costs if unit else None, now)

    def judge(self, record: RequestRecord) -> None:
        """Counts a request, once, against its objective."""
        if record.ttft is None or record.aborted:
            return
        objective = self.objectives.find(record.model, record.class_)
        if objective is None:
            return
        met = objective.met(record.ttft, record.tpot)
        outcome = "met" if met else "missed"
        self._count(semconv.SLA_REQUESTS, record.model, record.engine_id, record.class_, outcome)
        unit = self.units.get((record.engine_id, record.backend))
        if unit is not None:
            unit.tally.add(self._clock.monotonic(), met=met)

    def hook(self, engine_id: str, process: tuple[str, ...], resource: Mapping[str, AttributeValue]) -> None:
        """A hook's export told of its reads in flight."""
        text = resource.get(semconv.HOOK_READS)
        if text is not None:
            self.gathered.told(engine_id, process, text, self._clock.monotonic())

    def plan(self, engine_id: str, backend: str) -> Plan | None:
        """What is asked of an engine and backend in `auto`."""
        unit = self.units.get((engine_id, backend))
        return unit.plan if unit else None

    def asked(self, engine_id: str, backend: str) -> Plan:
        """As `plan`; of an engine that was not looked at yet what its kept state says, so that no directive jumps."""
        found = self.plan(engine_id, backend)
        if found is None:
            now = self._clock.monotonic()
            kept = memory.from_json(self._kept.get(json_key((engine_id, backend))), now, self._down)
            found = decide(kept, Evidence(), now)[1]
        return found

    def since(self, engine_id: str, backend: str) -> float | None:
        """Unix time of the last change of state in this run; None: there was none."""
        unit = self.units.get((engine_id, backend))
        return unit.since if unit else None

    def behind(self, model: str, backend: str) -> int:
        """Requests behind the models of a backend."""
        cell = self._by_backend.get((model, backend), {}).get(ALL)
        return cell.n if cell else 0

    def flight(self, key: Key) -> tuple[int, int, float]:
        """Reads in flight as last told, their bytes, the age of the oldest."""
        held = self.gathered.found.get(key)
        return held.flight(self._clock.monotonic()) if held else (0, 0, 0.0)

    def standing(self, key: Key, objective: Objective) -> Standing:
        """How the objective stood over the last minutes."""
        unit = self.units[key]
        return standing(objective, *unit.tally.counts(self._clock.monotonic()), unit.tally.seconds)

    def step(self, engines: Sequence[tuple[str, str, Sequence[str]]]) -> set[str]:
        """One turn over `engines` (id, model, backends); the ids of those of which something else is asked now."""
        now = self._clock.monotonic()
        self._refit()
        changed: set[str] = set()
        pools: dict[str, list[tuple[Key, str]]] = {}
        for engine_id, model, backends in engines:
            for backend in backends:
                pools.setdefault(backend, []).append(((engine_id, backend), model))
        for backend, members in pools.items():
            parts = self._share(backend, members, now)
            flights = {key: self.gathered.of(key).flight(now)[1] for key, _ in members}
            flying = sum(flights.values())
            # Two, so that each engine finds one that is not itself without a look at all the others.
            healed = heapq.nlargest(2, ((unit.healed, key) for key, _ in members if (unit := self.units.get(key))))
            for key, model in members:
                others = next((at for at, other in healed if other != key), -math.inf)
                pooled = Pooled(len(members), parts.get(key[0]), flying - flights[key], others)
                if self._alone(key, model, pooled, now):
                    changed.add(key[0])
        live = {key for members in pools.values() for key, _ in members}
        for key in [each for each in self.units if each not in live]:
            self._silent[key] = self.units.pop(key).state
            if len(self._silent) > SILENT_LIMIT:
                del self._silent[next(iter(self._silent))]
        while len(self._pools) > SILENT_LIMIT:
            del self._pools[next(iter(self._pools))]
        self._changed |= bool(changed) and any(
            (unit.state.sent and unit.state.sent.fetch) or unit.state.name != OPEN for unit in self.units.values()
        )
        return changed

    def save(self) -> dict[str, Any] | None:
        """What the ledger keeps for the next run; None while nothing changed, or it was kept a moment ago."""
        now = self._clock.monotonic()
        if not self._changed or now - self._saved < SAVE_SECONDS:
            return None
        self._saved, self._changed = now, False
        units = {json_key(key): memory.to_json(unit.state, now) for key, unit in self.units.items()}
        pools = {backend: memory.pool_to_json(pool, now) for backend, pool in self._pools.items()}
        return {"at": round(self._clock.wall(), 1), "units": units, "pools": pools}

    def _alone(self, key: Key, model: str, pooled: Pooled, now: float) -> bool:
        """As `_one`; what fails for one engine costs nobody else their turn, and that engine starts afresh.

        It is then asked what a new one is, so the first failure in a row is a change.
        """
        try:
            changed = self._one(key, model, pooled, now)
        except Exception:  # the outermost frame of one engine's controller
            first = key not in self._failed
            if first:
                log.exception("controller_failed", engine_id=key[0], backend=key[1])
            self._failed.add(key)
            self.units.pop(key, None)
            return first
        self._failed.discard(key)
        return changed

    def _one(self, key: Key, model: str, pooled: Pooled, now: float) -> bool:
        unit = self.units.get(key)
        if unit is None:
            kept = self._silent.pop(key, None)
            if kept is None:
                kept = memory.from_json(self._kept.pop(json_key(key), None), now, self._down)
            unit = self.units[key] = Unit(kept, model)
        held = self.gathered.of(key)
        link = self._link(key[1])
        count, size, oldest = held.flight(now)
        waits = not (held.reads or oldest > 0.0 or unit.state.name in (BYPASS, HALF_OPEN) or link != unit.link)
        if waits and unit.state.against_since is None and now - unit.decided < IDLE_SECONDS:
            return False
        cells = self._by_backend.get((model, key[1]), {})
        objective, classes = self.objectives.for_model(model)
        evidence = Evidence(
            cells=cells, objective=objective, class_objectives=classes,
            rtt=link[0], reachable=link[1],
            inflight=count, inflight_bytes=size, oldest_age=oldest, reads=held.taken(), mix=held.rates(now),
            max_inflight=pooled.part, members=pooled.members, sharing_bytes=float(pooled.sharing_bytes),
            peers_healed=pooled.healed, waiting=held.waiting(now),
        )  # fmt: skip
        before, was = unit.plan, unit.state.name
        unit.state, plan = decide(unit.state, evidence, now)
        unit.plan, unit.link, unit.decided = plan, link, now
        unit.costs = costs_of(plan.coefficients) if plan.coefficients.fetch else None
        unit.verdict = cells[ALL].verdict if ALL in cells else Verdict()
        if (was, unit.state.name) == (HALF_OPEN, OPEN):
            unit.healed = now
        if plan.changed:
            self._tell(key, unit, before, plan)
        self._attain(key, unit, plan, now)
        return before is None or _asked(before) != _asked(plan)

    def _share(self, backend: str, members: Sequence[tuple[Key, str]], now: float) -> dict[str, int]:
        if len(members) < 2:
            return {}
        states: dict[str, Member] = {}
        waits: list[float] = []
        for key, _ in members:
            held, unit = self.gathered.of(key), self.units.get(key)
            costs, plan = (unit.costs, unit.plan) if unit else (None, None)
            stopped = plan is not None and plan.state == BYPASS
            waits.append(held.waiting(now))
            states[key[0]] = member(
                held.reads, costs, held.flight(now)[0], stopped=stopped, wants=bool(held.mix), waiting=waits[-1]
            )
        waiting = sum(waits) / len(waits)
        spare = (
            headroom(self._by_backend.get((model, backend), {}).get(ALL), waiting)
            for model in {each for _, each in members}
        )
        least = min((each for each in spare if each is not None), default=None)  # of several models the least
        pool = self._pools.pop(backend, None)
        if pool is None:
            pool = memory.pool_from_json(self._kept_pools.pop(backend, None), now)
        self._pools[backend], parts = shared(pool, states, least, now)
        return parts

    def _refit(self) -> None:
        fitted = self._cells()
        if fitted is self._fitted:
            return
        self._fitted = fitted
        self._by_backend = {}
        for cell in fitted:
            self._by_backend.setdefault((cell.model, cell.backend), {})[cell.class_] = cell

    def _tell(self, key: Key, unit: Unit, before: Plan | None, plan: Plan) -> None:
        unit.since = self._clock.wall()
        was = before.state if before else "open"
        self._publish(
            Event(
                at=unit.since, kind=semconv.EVENT_CONTROLLER, scope=f"engine:{key[0]}",
                message=f"{key[1]}: {was} -> {plan.state} ({plan.reason or 'nothing speaks against reads'})",
                evidence={"backend": key[1], "from": was, "to": plan.state, "reason": plan.reason, **plan.evidence},
            )
        )  # fmt: skip

    def _attain(self, key: Key, unit: Unit, plan: Plan, now: float) -> None:
        if plan.projection.attainable == unit.attainable:
            unit.unattainable_since = None
            return
        unit.unattainable_since = now if unit.unattainable_since is None else unit.unattainable_since
        if now - unit.unattainable_since < ATTAIN_SECONDS:
            return
        unit.attainable, unit.unattainable_since = plan.projection.attainable, None
        says = "is in reach again" if unit.attainable else "is out of reach on either road; the cheaper one is taken"
        self._publish(
            Event(
                at=self._clock.wall(), kind=semconv.EVENT_SLA, scope=f"engine:{key[0]}",
                message=f"{key[1]}: the objective {says}",
                evidence={
                    "backend": key[1], "attainable": unit.attainable,
                    "remote_seconds": plan.projection.remote_tail, "recompute_seconds": plan.projection.recompute_tail,
                    "bound_seconds": plan.coefficients.sla.get("ttft_seconds"), "source": "projected",
                },
            )
        )  # fmt: skip


def json_key(key: Key) -> str:
    """An engine and backend as one text; engine ids hold no newline."""
    return "\n".join(key)


def _asked(plan: Plan) -> tuple[object, ...]:
    """What of a plan reaches a hook."""
    return plan.state, plan.reason, plan.reads, plan.coefficients
