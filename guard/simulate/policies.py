"""The fixed choices and the rivals: each decides about one request at one moment, from what it would really know.

always, never      the two fixed choices
threshold          never where the idle RTT is above a bound (200 us, the published departure point)
static             reads >= 1,024 reusable tokens while fewer than 8 requests wait (llm-d-router PR 2833)
deadline           always, but computes what has not been read within a fixed time
clairvoyant        knows all queues and the link's future until the read's end: the quicker road for this request; a
                   bound on what deciding per request can reach without regard for those behind it, not an optimum

The rivals are treated kindly: static knows the match before the lookup, as a router's index would; threshold knows the
true idle RTT at once; deadline may leave a load under way, which vLLM does not allow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from guard import gate, semconv
from guard.gate import Decision
from guard.simulate.job import Job
from guard.simulate.link import Link
from guard.simulate.scenario import Scenario

if TYPE_CHECKING:
    from guard.simulate.engine import Engine

THRESHOLD_RTT: Final = 200e-6
STATIC_TOKENS: Final = 1024
STATIC_WAITING: Final = 8

READ: Final = Decision(semconv.DECISION_REMOTE, gate.ON)
LEAVE: Final = Decision(semconv.DECISION_SKIP, gate.OFF)


@dataclass
class World:
    """What policies may look at."""

    scenario: Scenario
    link: Link
    engines: "list[Engine]"
    busy: Callable[[float], bool] = lambda _now: True  # requests are under way or still to come


Rule = Callable[[World, float, Job], bool]


class Fixed:
    """A rule asked before the lookup; what it lets through is read."""

    def __init__(self, world: World, rule: Rule, deadline: float | None = None) -> None:
        self._world = world
        self._rule = rule
        self._deadline = deadline

    def stores(self, engine: int) -> bool:
        """Always."""
        return True

    def lookup(self, now: float, job: Job) -> Decision:
        """What the rule says."""
        return READ if self._rule(self._world, now, job) else LEAVE

    def load(self, now: float, job: Job) -> Decision:
        """Whatever was looked up is read."""
        return READ

    def opened(self, now: float, job: Job, *, fetch: bool) -> None:
        """Not its business."""

    def closed(self, now: float, job: Job, *, fetch: bool, ok: bool) -> None:
        """Not its business."""

    def deadline(self, job: Job) -> float | None:
        """The fixed time, where there is one."""
        return self._deadline


def fixed(name: str, world: World) -> Fixed:
    """One of the policies above by its name.

    Raises:
        KeyError: there is none of that name.
    """
    return Fixed(world, RULES[name], world.scenario.deadline if name == "deadline" else None)


def _threshold(world: World, now: float, job: Job) -> bool:
    return world.link.condition(now, job.engine).rtt <= THRESHOLD_RTT


def _static(world: World, now: float, job: Job) -> bool:
    engine = world.engines[job.engine]
    return engine.peek(job) >= STATIC_TOKENS and engine.waiting < STATIC_WAITING


def _clairvoyant(world: World, now: float, job: Job) -> bool:
    engine = world.engines[job.engine]
    gain = engine.peek(job)
    if gain <= 0:
        return False
    return engine.remote_seconds(now, job, gain) < engine.worth_seconds(job, gain)


RULES: Final[dict[str, Rule]] = {
    "always": lambda _world, _now, _job: True,
    "never": lambda _world, _now, _job: False,
    "threshold": _threshold,
    "static": _static,
    "deadline": lambda _world, _now, _job: True,
    "clairvoyant": _clairvoyant,
}
