"""What the controller is told and what it answers, per engine and backend. Times in seconds of one clock.

    state, plan = decide(state, evidence, now)          # guard.control.controller; pure
    directive = plan.directive(id=..., engine_id=..., backend=...)

Call it about four times a second. Start with `State()`. `Evidence.reads` are those that ended since the last call.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from guard import semconv
from guard.estimate.shapes import Cell
from guard.slo.objective import Objective
from guard.wire import Directive, Reads

OPEN: Final = "open"
LIMITED: Final = "limited"
BYPASS: Final = "bypass"
HALF_OPEN: Final = "half-open"
STATES: Final = (OPEN, LIMITED, BYPASS, HALF_OPEN)

ALL: Final = "all"
"""Name of the pooled cell and of the class that stands for every class without a cell of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A remote read that ended: `seconds` is lookup plus fetch of its request, as `Costs.read_seconds` projects it.

    `at` is when it ended. `tagged`: it was let through as a trickle. A failed one has `ok` false. `waited` is how much
    of `seconds` may have passed after the data were there, until a step of a busy engine saw it: no evidence.
    """

    at: float
    seconds: float
    prompt_tokens: int
    local_tokens: int
    loaded_tokens: int
    bytes: float = 0.0
    inflight: int = 1  # reads in flight when it began, itself included
    running: int = 0
    rtt: float | None = None
    ok: bool = True
    tagged: bool = False
    waited: float = 0.0

    @property
    def least(self) -> float:
        """Seconds that it took at the least."""
        return max(self.seconds - self.waited, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one engine and backend now.

    `cells` by class, the pooled one under `all`. `rtt` is the idle RTT by probes or kernel, None where nobody measures
    it; `reachable` False when probes fail, None when there are none. `inflight` to `oldest_age` as the hook last told.
    `mix` is requests per second by class (those that could read remotely); `sharing_bytes` what other engines of the
    backend's pool have in flight. `max_inflight` is this engine's part of the pool's budget (0: not its turn),
    `members` how many engines the pool has; `peers_healed` is when another of them last opened again because reads
    paid. `waiting` is how many others have waited for this engine's GPU of late, on average: what one reads, none of
    them waits for (by Little's law, `gpu_seconds` of requests per second); 0 where a load holds the engine up.
    """

    cells: Mapping[str, Cell] = field(default_factory=dict)
    objective: Objective | None = None
    class_objectives: Mapping[str, Objective] = field(default_factory=dict)
    rtt: float | None = None
    reachable: bool | None = None
    inflight: int = 0
    inflight_bytes: int = 0
    oldest_age: float = 0.0
    reads: Sequence[Read] = ()
    mix: Mapping[str, float] = field(default_factory=dict)
    sharing_bytes: float = 0.0
    max_inflight: int | None = None
    members: int = 1
    peers_healed: float = -math.inf
    waiting: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The four mappings of a directive (`guard.costs`)."""

    fetch: Mapping[str, float] = field(default_factory=dict)
    prefill: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sla: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Projected TTFT of the reference request (idle engine, its lookup included), and what follows for the mix.

    `best` is the least ratio of remote to recompute over the classes of the mix, each with its price for those who wait
    (`guard.costs`): above 1 no class gains. `gain` is what a request that hits gains by reading, averaged over the mix,
    seconds; below 0 it loses.
    """

    remote: float | None = None
    recompute: float | None = None
    remote_tail: float | None = None
    recompute_tail: float | None = None
    best: float = 0.0
    losing_share: float = 0.0
    gain: float = 0.0
    attainable: bool = True
    sla: bool = False  # remote misses the bound and recomputing meets it, in every class


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The controller's memory for one engine and backend; plain values, so that the ledger can keep it."""

    name: str = OPEN
    since: float = -math.inf
    reason: str = ""
    against_since: float | None = None  # since when what would change the state holds
    reads: tuple[Read, ...] = ()
    failures: tuple[float, ...] = ()
    pace: float = 1.0  # actual over projected, by the last reads
    goods: int = 0  # half-open: trickle reads that paid; bypass: reads that were stuck and have ended well
    backoff: float = 0.0  # seconds before the next try in bypass; in half-open, too, after one that told nothing
    lost: float = (
        0.0  # what the last bad trickle cost its request, seconds; half-open: what those that told nothing did
    )
    share: float = 1.0
    limit: float | None = None
    baseline: float | None = None
    raised: float = -math.inf  # when share or limit last rose
    sent: Coefficients | None = None
    fresh: float = -math.inf  # reads that began earlier are of a link that has healed since
    rtt: float | None = None  # when bypass was entered, or last tried in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of the hook, and why. `evidence` are the numbers behind it, for people and the ledger."""

    state: str
    reason: str
    reads: Reads
    coefficients: Coefficients
    projection: Projection
    evidence: Mapping[str, Any] = field(default_factory=dict)
    changed: bool = False  # the state is another than before

    def directive(self, *, id: str, engine_id: str, backend: str, mode: str = semconv.MODE_AUTO) -> Directive:  # noqa: A002
        """The plan as a directive with nothing of an operator in it."""
        c = self.coefficients
        return Directive(
            id=id, engine_id=engine_id, backend=backend, mode=mode, state=self.state, reads=self.reads,
            fetch=c.fetch, prefill=c.prefill, classes=c.classes, sla=c.sla, reason=self.reason,
        )  # fmt: skip
