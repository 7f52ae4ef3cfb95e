"""Runs simulated engines in real time against a kvguard service: what `kvguard demo` and `make run` show.

The requests and their times are invented (a scenario); what carries them is not: each engine has the hook's own
recorder, exporter and directive poller, and asks the real gate. Every span says `kvguard.simulated`, and
`service.name` is `vllm-simulated`.
"""

import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from guard import __version__, semconv
from guard.hook.config import HookConfig
from guard.hook.directives import Directives
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.simulate import scenario as scenarios
from guard.simulate.clock import Schedule
from guard.simulate.guarded import Guarded, Leases
from guard.simulate.job import Gates, Job
from guard.simulate.policies import World
from guard.simulate.records import ADDRESS, MODEL, engine_id
from guard.simulate.run import Simulation
from guard.simulate.scenario import Scenario
from guard.simulate.spans import Teller

SERVICE: Final = "vllm-simulated"
DEFAULT_SCRIPT: Final = "demo"
LONGEST_NAP: Final = 0.25


class Traffic:
    """A scenario whose engines ask the real gate and tell the real recorders; clock 0 is `anchor_ns` in Unix time.

    `speed` runs the script of the link so many times faster; requests and engines keep their own pace.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        anchor_ns: int,
        recorders: Sequence[Recorder],
        directives: Sequence[Leases],
        speed: float = 1.0,
    ) -> None:
        label = backend(scenario)
        self._tellers = [
            Teller(
                scenario, Scope(engine_id(number), MODEL), label, recorder, anchor_ns,
                random.Random(f"{scenario.seed}/spans {number}"),  # noqa: S311
            )
            for number, recorder in enumerate(recorders)
        ]  # fmt: skip
        self._backend = label
        self._directives = directives
        self.simulation = Simulation(scenario, self._gates, self, pace=speed, keep=False)
        self.schedule = self.simulation.schedule

    def reads_in_flight(self, number: int, now: float) -> str:
        """What an engine has in flight, as the hook's exporter tells it (`semconv.HOOK_READS`); for another thread."""
        return self._guarded.reads_in_flight(number, now)

    def _gates(self, world: World, _schedule: Schedule) -> Gates:
        self._guarded = Guarded(world, self._directives, self._backend.label, self._backend.capability)
        return self._guarded

    def first(self, now: float, job: Job) -> None:
        """A first token, or an abort before it."""
        self._tellers[job.engine].first(now, job)

    def stored(self, now: float, job: Job, tokens: int, seconds: float) -> None:
        """Its KV goes to the store."""
        self._tellers[job.engine].stored(now, job, tokens, seconds)

    def finished(self, now: float, job: Job) -> None:
        """A request is over."""
        self._tellers[job.engine].finished(now, job)


def backend(scenario: Scenario) -> Backend:
    """The remote tier of every simulated engine."""
    connector = scenario.connector
    return Backend(
        label=f"{connector.kind}/simulated", capability=connector.capability, address=ADDRESS, port=6379,
        block_tokens=16, rank_bytes=connector.bytes_per_token,
    )  # fmt: skip


def script(name: str | None, engines: int | None = None, seed: int | None = None) -> Scenario:
    """The scenario of a demo that runs until it is stopped.

    Raises:
        ConfigError: there is none of that name, or a key is wrong.
    """
    found = scenarios.load(name or DEFAULT_SCRIPT)
    update: dict[str, object] = {"seconds": float("inf")}
    if engines is not None:
        update["engine"] = found.engine.model_copy(update={"count": engines})
        update["workload"] = scenarios.scaled(found.workload, engines / found.engine.count)
    if seed is not None:
        update["seed"] = seed
    return found.model_copy(update=update)


def run(
    endpoint: str,
    scenario: Scenario,
    *,
    speed: float = 1.0,
    duration: float | None = None,
    stop_event: threading.Event | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
) -> None:
    """Sends simulated traffic to the service at `endpoint` until `stop_event` is set or `duration` seconds are over.

    Args:
        endpoint: URL of the service; several, comma-separated, are tried in turn.
        scenario: Engines, link and workload; see `script`.
        speed: How much faster the changes of the link come.
        duration: Seconds; None runs until stopped.
        stop_event: Ends the run from another thread.
        token_file: Bearer token with the scope `ingest`.
        ca_file: Certificate authorities for https.
    """
    stop = stop_event or threading.Event()
    config = HookConfig(
        endpoints=tuple(part.strip().rstrip("/") for part in endpoint.split(",") if part.strip()),
        token_file=token_file,
        ca_file=ca_file,
    )
    numbers = range(scenario.engine.count)
    label = backend(scenario).label
    recorders = [Recorder(config.ring) for _ in numbers]
    directives = [Directives(config, engine_id(number), [label], MODEL) for number in numbers]
    traffic = Traffic(scenario, anchor_ns=time.time_ns(), recorders=recorders, directives=directives, speed=speed)
    began = time.monotonic()
    exporters = [
        Exporter(
            config, recorders[number], resource(number),
            live=lambda each=number: traffic.reads_in_flight(each, time.monotonic() - began),  # type: ignore[misc]
        )
        for number in numbers
    ]  # fmt: skip
    end = float("inf") if duration is None else duration
    threads: list[Directives | Exporter] = [*directives, *exporters]
    for thread in threads:
        thread.start()
    try:
        while not stop.is_set() and (now := time.monotonic() - began) < end:
            following = min(traffic.schedule.run_until(now), end, now + LONGEST_NAP)
            stop.wait(max(0.0, began + following - time.monotonic()))
    finally:
        for thread in threads:
            thread.stop(2.0)


def resource(number: int) -> dict[str, str | int]:
    """The resource attributes of a simulated engine."""
    return {
        semconv.SERVICE_NAME: SERVICE,
        semconv.SERVICE_INSTANCE_ID: engine_id(number).rpartition("/")[0],
        semconv.SERVICE_VERSION: __version__,
        semconv.HOST_NAME: socket.gethostname(),
        semconv.PROCESS_PID: os.getpid(),
        semconv.ENGINE_ID: engine_id(number),
        semconv.SIMULATED: True,
    }
