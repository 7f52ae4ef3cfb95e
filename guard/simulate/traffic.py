"""Runs simulated engines in real time against a kvguard service: what `kvguard demo` and `make run` show.

The requests and their times are invented (`guard.simulate.model`); what carries them is not: each engine has the
hook's own recorder, exporter and directive poller, and asks the real gate. Every span says `kvguard.simulated`, and
`service.name` is `vllm-simulated`.
"""

import heapq
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from guard import __version__, semconv
from guard.connectors import LMCACHE, LMCACHE_MP
from guard.hook.config import HookConfig
from guard.hook.directives import Directives
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
from guard.hook.requests import Backend, Scope
from guard.simulate import model
from guard.simulate.engine import Engine, Leases

SERVICE: Final = "vllm-simulated"
MODEL: Final = "simulated/8b"
RATE: Final = 2.0
LONGEST_NAP: Final = 0.25
BACKENDS: Final = (("lmcache-mp/resp", LMCACHE_MP), ("lmcache/redis", LMCACHE))
"""Engines take turns: one loads asynchronously through an LMCache server, one synchronously in its own process."""


class Schedule:
    """What happens when. Steps run in the order of their times and see their own time as now."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, step: Callable[[float], None]) -> None:
        """Adds a step."""
        heapq.heappush(self._heap, (when, next(self._numbers), step))

    def run_until(self, now: float) -> float:
        """Runs what is due; returns the time of the next step, infinity when there is none."""
        while self._heap and self._heap[0][0] <= now:
            when, _, step = heapq.heappop(self._heap)
            step(when)
        return self._heap[0][0] if self._heap else float("inf")


class Traffic:
    """Engines and the users that talk to them, on one schedule. Seeded: the same seed gives the same requests.

    The schedule's clock starts at 0, which is `anchor_ns` in Unix time.
    """

    def __init__(
        self,
        engines: int,
        *,
        rate: float,
        seed: int,
        anchor_ns: int,
        recorders: list[Recorder],
        directives: list[Leases],
    ) -> None:
        self.schedule = Schedule()
        self._rng = random.Random(seed)  # noqa: S311  traffic, not secrets
        self._rate = rate * engines
        self._users = model.Conversations(self._rng, active=20 * engines)
        link, store = model.Link(), model.PrefixCache(400_000, model.CHUNK_TOKENS)
        for conversation, tokens in self._users.histories()[::2]:  # so that there are hits from the start
            store.put(conversation, tokens)
        self.engines = [
            Engine(
                number,
                Scope(engine_id(number), MODEL),
                backend(number),
                recorder=recorders[number],
                directives=directives[number],
                link=link,
                store=store,
                rng=random.Random(f"{seed}/{number}"),  # noqa: S311
                at=self.schedule.at,
                anchor_ns=anchor_ns,
            )
            for number in range(engines)
        ]
        self.schedule.at(self._gap(), self._arrive)

    def _arrive(self, now: float) -> None:
        self._rng.choice(self.engines).arrive(now, self._users.next())
        self.schedule.at(now + self._gap(), self._arrive)

    def _gap(self) -> float:
        return self._rng.expovariate(self._rate)


def engine_id(number: int) -> str:
    """The id under which a simulated engine is known."""
    return f"{instance(number)}/0"


def instance(number: int) -> str:
    """The address that a simulated engine would have."""
    return f"simulated-{number}:8000"


def backend(number: int) -> Backend:
    """The remote tier of a simulated engine."""
    label, capability = BACKENDS[number % len(BACKENDS)]
    return Backend(
        label=label, capability=capability, address="redis.simulated", port=6379,
        block_tokens=model.BLOCK_TOKENS, rank_bytes=model.TOKEN_BYTES,
    )  # fmt: skip


def run(
    endpoint: str,
    *,
    engines: int = 2,
    rate: float = RATE,
    seed: int = 0,
    duration: float | None = None,
    stop_event: threading.Event | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
) -> None:
    """Sends simulated traffic to the service at `endpoint` until `stop_event` is set or `duration` seconds are over.

    Args:
        endpoint: URL of the service; several, comma-separated, are tried in turn.
        engines: How many engines to simulate.
        rate: Requests per second and engine.
        seed: The same seed gives the same requests.
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
    recorders = [Recorder(config.ring) for _ in range(engines)]
    directives = [Directives(config, engine_id(n), [backend(n).label], MODEL) for n in range(engines)]
    exporters = [Exporter(config, recorders[n], resource(n)) for n in range(engines)]
    traffic = Traffic(
        engines,
        rate=rate,
        seed=seed,
        anchor_ns=time.time_ns(),
        recorders=recorders,
        directives=list(directives),
    )
    began = time.monotonic()
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
        semconv.SERVICE_INSTANCE_ID: instance(number),
        semconv.SERVICE_VERSION: __version__,
        semconv.HOST_NAME: socket.gethostname(),
        semconv.PROCESS_PID: os.getpid(),
        semconv.ENGINE_ID: engine_id(number),
        semconv.SIMULATED: True,
    }
