"""A small world for the controller: one engine, one link, the real gate and the real pace. Deterministic.

Requests come at a fixed rate, every one of them finds `MATCH` of its `PROMPT` tokens in the remote tier. A read takes
what the link says at its start; a link that does not move ends its reads when it heals. The directive is what the
controller said at its last step, 0.3 s after it was worked out.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from guard import gate
from guard.connectors import MOONCAKE_STORE
from guard.control.controller import decide
from guard.control.shapes import Evidence, Plan, Read, State
from guard.costs import Traffic
from guard.estimate.shapes import Cell, FetchModel, LookupModel, PrefillModel
from guard.pace import Pace
from guard.wire import Directive

PROMPT, MATCH, TOKEN_BYTES = 4000, 3840, 1000
RECOMPUTE = 0.4  # seconds of a full prefill
TICK = 0.25
DELAY = 0.3

CELL = Cell(
    model="m", backend="b", class_="all", n=500, bytes_per_token=TOKEN_BYTES,
    fetch=FetchModel(t0=0.004, kappa=32.0, seconds_per_byte=1e-8, spread=0.06, n=500),
    lookup=LookupModel(t0=0.001, kappa=1.0, hit_probability=1.0, expected_tokens=MATCH, spread=0.06, n=500),
    prefill=PrefillModel(a=0.0, b=1e-4, spread=0.05, n=500),
    rtt_floor=2e-4, rtt_now=2e-4, reference_tokens=PROMPT, reference_matched=MATCH,
)  # fmt: skip


@dataclass
class Link:
    """What the network does at a time: RTT, its share of the bandwidth, whether reads end and whether they fail."""

    rtt: float = 2e-4
    bandwidth: float = 1.0
    stuck_until: float = 0.0
    fails: bool = False


@dataclass
class Request:
    at: float
    remote: bool
    reason: str
    seconds: float = 0.0  # of the read


@dataclass
class World:
    """`link` gives the network at a time. `probed`: the controller is told RTT and whether the store answers."""

    link: Callable[[float], Link]
    probed: bool = True
    answers: Callable[[float], bool] = lambda _: True
    rate: float = 5.0
    noise: float = 0.0
    seed: int = 1
    cell: Cell | None = CELL
    state: State = field(default_factory=State)
    requests: list[Request] = field(default_factory=list)
    states: list[tuple[float, str, str]] = field(default_factory=list)

    def run(self, seconds: float) -> "World":
        rng, pace = random.Random(self.seed), Pace()
        directive: Directive | None = None
        pending: list[tuple[float, Directive]] = []
        reads: list[tuple[float, int, Request, bool]] = []
        told: list[Read] = []
        arrivals = self._arrivals(rng, seconds)
        arrival = next(arrivals, seconds)
        tick, number, time = 0.0, 0, 0.0
        while True:
            end = min((each[0] for each in reads), default=float("inf"))
            time = min(arrival, tick, end)
            if time >= seconds:
                return self
            while pending and pending[0][0] <= time:
                directive = pending.pop(0)[1]
                pace.learn(directive.costs) if pace.costs is not directive.costs else None
            now = int(time * 1e9)
            if time == end:
                each = min(reads, key=lambda one: one[0])
                reads.remove(each)
                _, key, request, ok = each
                pace.end(key, now, ok=ok)
                told.append(
                    Read(
                        at=time, seconds=request.seconds, prompt_tokens=PROMPT, local_tokens=0, loaded_tokens=MATCH,
                        bytes=MATCH * TOKEN_BYTES, inflight=1, ok=ok, tagged=request.reason == gate.TRICKLE,
                    )
                )  # fmt: skip
            elif time == arrival:
                arrival = next(arrivals, seconds)
                number += 1
                pace.age_out(now)
                traffic = Traffic(pace.inflight, slowdown=pace.slowdown(now), overdue=pace.overdue(now))
                decision = gate.admit_load(
                    directive, MOONCAKE_STORE, matched_tokens=MATCH, matched_bytes=MATCH * TOKEN_BYTES,
                    prompt_tokens=PROMPT, traffic=traffic, broken=pace.broken(now), draw=rng.random(),
                    trickle_due=directive is not None and pace.trickle_due(now, directive.reads.trickle_seconds),
                )  # fmt: skip
                request = Request(time, decision.admitted, decision.reason)
                self.requests.append(request)
                if decision.admitted:
                    if decision.reason == gate.TRICKLE:
                        pace.last_trickle = now
                    link = self.link(time)
                    request.seconds = self._read(link, rng) + max(0.0, link.stuck_until - time)
                    projected = pace.costs.read_seconds(MATCH * TOKEN_BYTES) if pace.costs else 0.0
                    pace.begin(number, now, projected, MATCH * TOKEN_BYTES)
                    reads.append((time + request.seconds, number, request, not link.fails))
            else:
                plan = self._step(pace, now, time, told)
                told = []
                pending.append((time + DELAY, plan.directive(id=str(time), engine_id="e", backend="b")))
                if not self.states or self.states[-1][1] != plan.state:
                    self.states.append((time, plan.state, plan.reason))
                tick += TICK

    def _arrivals(self, rng: random.Random, seconds: float) -> Iterator[float]:
        at = 0.05
        while at < seconds:
            yield at
            at += 1.0 / self.rate

    def _read(self, link: Link, rng: random.Random) -> float:
        seconds = 0.005 + 33.0 * link.rtt + MATCH * TOKEN_BYTES * 1e-8 / link.bandwidth
        return seconds * rng.lognormvariate(0.0, self.noise)

    def _step(self, pace: Pace, now: int, time: float, told: list[Read]) -> Plan:
        link = self.link(time)
        evidence = Evidence(
            cells={"all": self.cell} if self.cell else {}, rtt=link.rtt if self.probed else None,
            reachable=self.answers(time) if self.probed else None, inflight=pace.inflight,
            oldest_age=pace.oldest_age(now), reads=tuple(told), mix={"2k-4k/c0-4": self.rate},
        )  # fmt: skip
        self.state, plan = decide(self.state, evidence, time)
        return plan

    def untagged(self, start: float, end: float) -> list[Request]:
        """Requests that read remotely and were no trial."""
        return [one for one in self.requests if start <= one.at < end and one.remote and one.reason != gate.TRICKLE]

    def share(self, start: float, end: float) -> float:
        """Share of the requests that read remotely."""
        found = [one for one in self.requests if start <= one.at < end]
        return sum(one.remote for one in found) / len(found)

    def reversals(self, start: float, end: float) -> int:
        """Changes between reading and bypass."""
        return sum(name in ("bypass", "open") and reason != "" for at, name, reason in self.states if start < at < end)
