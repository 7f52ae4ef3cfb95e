"""Runs one scenario under one policy on a clock of its own, as fast as it goes."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from guard.errors import ConfigError
from guard.simulate import policies, workload
from guard.simulate.auto import Auto
from guard.simulate.cache import BlockCache
from guard.simulate.clock import Schedule
from guard.simulate.engine import Engine
from guard.simulate.job import Gates, Job, Prompt, Sink
from guard.simulate.link import Link
from guard.simulate.policies import World
from guard.simulate.results import Result, Row, row_of
from guard.simulate.scenario import Scenario
from guard.wire import RequestRecord

AUTO: Final = "auto"
POLICIES: Final = (*policies.RULES, AUTO)


class Simulation:
    """Engines, link, store and workload on one schedule.

    `gates` makes the policy, `sink` is told of requests too, `pace` runs the script of the link so many times faster,
    `keep` says whether the requests' rows are kept: a demo that runs for days must not.
    """

    def __init__(
        self,
        scenario: Scenario,
        gates: Callable[[World, Schedule], Gates],
        sink: Sink | None = None,
        *,
        pace: float = 1.0,
        keep: bool = True,
    ) -> None:
        self.schedule = Schedule()
        self.rows: list[Row] = []
        self._keep = keep
        self._scenario = scenario
        self._sink = sink
        self.link = Link(scenario.link, _rng(scenario, "link"), pace=pace)
        self.engines: list[Engine] = []
        self.world = World(scenario, self.link, self.engines)
        self.store = BlockCache(scenario.store.tokens // scenario.connector.chunk_tokens)
        self._workload = workload.make(scenario, _rng(scenario, "workload"))
        for blocks in self._workload.known():
            self.store.put(blocks)
        chosen = gates(self.world, self.schedule)
        self.engines += [
            Engine(
                number, scenario, schedule=self.schedule, link=self.link, store=self.store, gates=chosen, sink=self,
                rng=_rng(scenario, f"engine {number}"),
            )
            for number in range(scenario.engine.count)
        ]  # fmt: skip
        self._routing = _rng(scenario, "routing")
        self._open = 0
        self.world.busy = lambda now: self._open > 0 or not self._workload.over(now)
        self._workload.begin(self.schedule, self._send)

    def first(self, now: float, job: Job) -> None:
        """A first token, or an abort before it."""
        if self._sink is not None:
            self._sink.first(now, job)

    def stored(self, now: float, job: Job, tokens: int, seconds: float) -> None:
        """KV goes to the store."""
        if self._sink is not None:
            self._sink.stored(now, job, tokens, seconds)

    def finished(self, now: float, job: Job) -> None:
        """A request is over."""
        self._open -= 1
        if self._sink is not None:
            self._sink.finished(now, job)
        if self._keep and job.arrival >= self._scenario.warmup:
            self.rows.append(row_of(job, self._scenario))
        self._workload.finished(now, job)

    def _send(self, now: float, prompt: Prompt) -> None:
        self._open += 1
        number = self._routing.randrange(len(self.engines)) if prompt.engine is None else prompt.engine
        self.engines[number].arrive(now, prompt)


def learn(scenario: Scenario, seconds: float) -> list[RequestRecord]:
    """What a service would have recorded of the scenario in `observe` before its start, at clocks below 0."""
    auto = Auto(scenario.model_copy(update={"seconds": seconds}))
    simulation = Simulation(auto.scenario, lambda world, _: policies.fixed("always", world), auto)
    simulation.schedule.run_until(seconds + scenario.patience)
    return [
        replace(each, span_id=f"b{each.span_id}", arrival_ns=each.arrival_ns - int((seconds + 60.0) * 1e9))
        for each in auto.observed()
    ]


def simulate(scenario: Scenario, policy: str, known: Iterable[RequestRecord] = ()) -> Result:
    """The outcome of a policy on a scenario; the same scenario and seed give the same outcome.

    `known` are records from before (`learn`) for the policy that learns.

    Raises:
        ConfigError: there is no such policy, or the scenario's trace cannot be read.
    """
    began = time.perf_counter()
    auto = Auto(scenario, known) if policy == AUTO else None
    if auto is not None:
        simulation = Simulation(scenario, auto.gates, auto)
    elif policy in policies.RULES:
        simulation = Simulation(scenario, lambda world, _: policies.fixed(policy, world))
    else:
        raise ConfigError("policy", f"{policy!r} is not one of {', '.join(POLICIES)}")
    simulation.schedule.run_until(_end(scenario))
    rows = sorted(simulation.rows, key=lambda row: row.arrival)
    last = max((row.arrival + row.ttft for row in rows if row.ttft < float("inf")), default=1.0)
    seconds = max(1e-9, min(scenario.seconds, last) - scenario.warmup)
    return Result(
        scenario=scenario.title, policy=policy, seconds=seconds, rows=rows,
        bytes=simulation.link.bytes, ttft_bound=scenario.objective.ttft, tpot_bound=scenario.objective.tpot,
        states=auto.states() if auto else {}, changes=tuple(auto.changes) if auto else (),
        leaked=auto.inflight(_end(scenario)) if auto else 0, wall_seconds=time.perf_counter() - began,
    )  # fmt: skip


def _end(scenario: Scenario) -> float:
    """Long enough for the last request to end or to be given up."""
    return scenario.seconds + 10.0 * scenario.patience


def _rng(scenario: Scenario, part: str) -> random.Random:
    """A stream of its own for each part, so that a policy does not change what arrives."""
    return random.Random(f"{scenario.seed}/{part}")  # noqa: S311
