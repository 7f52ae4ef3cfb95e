"""The link between engines and the store: idle RTT, bandwidth, loss and stalls as a scenario changes them.

    a piece of a read: k serial round trips and its bytes      k*RTT*jitter + lost*RTO + bytes in the queue of the link

Bytes of all engines share one queue, first come first served; reads move in pieces, so that they take turns. Nothing
here waits: the caller asks for the end of a piece, or for the time at which one can begin.
"""

import math
import random
from dataclasses import dataclass
from typing import Final

from guard.simulate.scenario import Change, LinkSpec

RTO: Final = 0.2
"""First retransmission time-out of TCP on Linux, seconds; it doubles with every loss in a row (RFC 6298)."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The link at one moment, for one engine. Bandwidth is a factor of the whole."""

    rtt: float
    bandwidth: float = 1.0
    shared: float = 1.0  # of the part that all engines share
    loss: float = 0.0
    hang: bool = False


class Link:
    """One link; seeded, all time is passed in, calls come in the order of time."""

    def __init__(self, spec: LinkSpec, rng: random.Random, *, pace: float = 1.0) -> None:
        self._spec = spec
        self._rng = rng
        self._pace = pace
        self._speed = spec.gbit * 1e9 / 8
        self._free = 0.0
        self.bytes = 0

    def condition(self, at: float, engine: int) -> Condition:
        """What holds at `at` for `engine`: later changes win over earlier ones."""
        spec = self._spec
        at *= self._pace
        if not spec.change:
            return Condition(spec.rtt)
        rtt, bandwidth, shared, loss, hang = spec.rtt, 1.0, 1.0, 0.0, False
        for change in spec.change:
            since = _since(change, at)
            if since < 0.0 or (change.engines and engine not in change.engines):
                continue
            if change.rtt is not None:
                part = 1.0 if since >= change.ramp else since / change.ramp
                rtt = math.exp((1.0 - part) * math.log(max(rtt, 1e-6)) + part * math.log(max(change.rtt, 1e-6)))
            if change.bandwidth is not None:
                bandwidth = change.bandwidth
                shared = shared if change.engines else change.bandwidth
            loss = max(loss, change.loss)
            hang = hang or change.hang
        return Condition(rtt, bandwidth, shared, loss, hang)

    def ready(self, at: float, engine: int) -> float:
        """When something sent at `at` gets through: at once, or at the first retransmission after a stall."""
        again, wait = at, RTO
        while self.condition(again, engine).loss >= 1.0:
            again += wait
            wait = min(2.0 * wait, 120.0)
            if again - at > 3600.0:
                return math.inf
        return again

    def piece(self, at: float, engine: int, trips: float, size: int) -> float:
        """The time at which `trips` serial round trips that carry `size` bytes are over, begun at `at`."""
        now = self.condition(at, engine)
        latency = trips * now.rtt
        if self._spec.jitter and trips:
            latency *= self._rng.lognormvariate(0.0, self._spec.jitter)
        if now.loss:
            latency += RTO * sum(self._rng.random() < now.loss for _ in range(max(1, round(trips))))
        begin = max(self._free, at)
        self._free = begin + size / (self._speed * now.shared)
        self.bytes += size
        return begin + size / (self._speed * now.bandwidth) + latency

    def queued(self, at: float) -> float:
        """Seconds until the bytes that are on their way or wait are over."""
        return max(0.0, self._free - at)

    def seconds(self, size: int, condition: Condition) -> float:
        """Seconds that `size` bytes take on a link that is free."""
        return size / (self._speed * condition.bandwidth)

    def hangs(self, at: float, engine: int) -> bool:
        """Whether reads of this engine never end."""
        return self.condition(at, engine).hang


def in_force(change: Change, at: float) -> bool:
    """Whether the change holds at `at` of the script's time."""
    return _since(change, at) >= 0.0


def _since(change: Change, at: float) -> float:
    """Seconds since the change last began; negative when it is not in force."""
    since = at - change.at
    if since < 0.0:
        return -1.0
    if change.every:
        since %= change.every
    return since if since < change.for_ else -1.0
