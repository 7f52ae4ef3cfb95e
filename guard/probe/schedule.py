"""When to probe: a thread per target on a jittered grid that does not drift and never catches up in a burst."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from guard.probe.prober import Prober, Sample, Target

JITTER: Final = 0.1
"""Each probe leaves up to this part of the interval after its slot, so that targets and rounds do not march in step."""

STOP_SECONDS: Final = 2.0
_COSTS: Final = 4

log = structlog.get_logger("guard.probe.schedule")


class Slots:
    """Due times on a grid of `interval` seconds whose phase is drawn once. Pure: time is passed in."""

    def __init__(self, start: float, interval: float, rng: random.Random) -> None:
        self._start = start + rng.random() * interval
        self._interval = interval
        self._rng = rng
        self._next = 0

    def after(self, now: float) -> float:
        """The next due time; slots that have passed meanwhile are left out."""
        passed = int((now - self._start) // self._interval) + 1
        self._next = max(self._next, passed, 0)
        due = self._start + self._next * self._interval + self._rng.random() * JITTER * self._interval
        self._next += 1
        return due


class Budget:
    """Keeps a target's processor time below `share` of one core, whatever a round costs. Pure."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._begun = False

    def rest(self, cost: float) -> float:
        """Seconds that must pass after a round of `cost` processor seconds.

        The first round, and more of the later ones than their least, is what it takes to connect: no running cost.
        """
        if not self._begun:
            self._begun = True
            return 0.0
        self._costs.append(cost)
        return min(self._costs) / self._share


class Schedule:
    """Probes targets until it is stopped; `told` gets every sample with the wall time of its round, on that thread."""

    def __init__(
        self,
        probers: Iterable[tuple[Target, Prober]],
        told: Callable[[Target, float, Sample], None],
        *,
        cpu_share: float = 0.001,
        seed: int | None = None,
    ) -> None:
        self._told = told
        self._share = cpu_share
        self._stop = threading.Event()
        rng = random.Random(seed)  # noqa: S311 - jitter is no secret
        self._threads = [
            threading.Thread(
                target=self._run, args=(target, prober, random.Random(rng.random())), daemon=True,  # noqa: S311
                name=f"probe {target.prober} {target.target}"[:100],
            )
            for target, prober in probers
        ]  # fmt: skip

    def start(self) -> None:
        """Begins to probe."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the rounds and waits a moment for those under way; a read that hangs cannot be ended, only left."""
        self._stop.set()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, target: Target, prober: Prober, rng: random.Random) -> None:
        slots, budget = Slots(time.monotonic(), target.interval, rng), Budget(self._share)
        due = slots.after(time.monotonic())
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            before, wall = time.thread_time(), time.time()
            try:
                sample = prober.probe(target.count, target.timeout)
            except Exception as error:  # a prober's outermost frame: the others go on
                log.exception("prober_failed", prober=target.prober, target=target.target)
                sample = Sample(problem=f"internal error of the prober: {error!r}")
            rest = budget.rest(time.thread_time() - before)
            if not self._stop.is_set():
                self._told(target, wall, sample)
            now = time.monotonic()
            due = slots.after(now)
            while due < now + rest:
                due = slots.after(now)
        prober.close()
