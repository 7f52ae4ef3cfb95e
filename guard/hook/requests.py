"""What is known of one request while it lives in the engine. Engine threads set the fields; `records.py` tells of them.

Times are `time.monotonic_ns`; each request carries one anchor that turns them into wall time, so that a step of the
wall clock moves a request as a whole and never makes a negative duration.

    arrival -i-> seen -q1-> lookup_start -u-> lookup_end -q2-> alloc -f-> usable -q3-> scheduled -p-> first

u ends with the answer that was used first. f is the sum of the fetch attempts, each from blocks allocated to KV
usable. Where a load is synchronous the request is scheduled before its KV is usable: q3 is 0 and p starts at usable.
"""

from dataclasses import dataclass, field
from typing import Any

from guard import gate, semconv
from guard.connectors import Capability
from guard.gate import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One remote tier as one guarded connector of this process sees it."""

    label: str
    capability: Capability
    address: str = ""
    port: int = 0
    block_tokens: int = 16
    rank_bytes: int = 0  # KV bytes per token on one rank, 0 where the geometry is not known
    ranks: int = 1

    @property
    def token_bytes(self) -> int:
        """KV bytes per token over all ranks."""
        return self.rank_bytes * self.ranks


@dataclass(slots=True, eq=False)
class Attempt:
    """One fetch: blocks allocated to KV usable."""

    backend: Backend
    number: int
    span_id: int
    start: int
    tokens: int
    asynchronous: bool
    inflight: int  # open fetches of this backend, this one included
    blocks: Any = None  # vLLM's KVCacheBlocks, read only when a load fails
    local_tokens: int = 0
    end: int = 0
    loaded: int = 0
    failed: bool = False
    error: str = ""
    batch: int = 0
    told: bool = False

    @property
    def outcome(self) -> str:
        """ok, partial or failed."""
        if not self.failed:
            return semconv.OUTCOME_OK
        return semconv.OUTCOME_PARTIAL if self.loaded > 0 else semconv.OUTCOME_FAILED


@dataclass(slots=True, eq=False)
class Leg:
    """What one guarded connector did for one request; there are several under a MultiConnector."""

    backend: Backend
    span_id: int
    start: int = 0  # the lookup began; before the first poll where it is started ahead
    first_poll: int = 0
    end: int = 0  # the first answer
    polls: int = 0
    matched: int = 0
    local: int = 0
    round_trips: int = -1
    skip: Decision | None = None
    load: Decision | None = None
    asynchronous: bool = False
    directive_id: str = ""
    propensity: float = 0.0  # of the road taken, where it was drawn; else 0
    trickled: int = 0  # when the trickle before this one was, where this lookup is one
    reading: bool = False  # its lookup counts as a read in flight

    @property
    def refusal(self) -> Decision | None:
        """The decision that kept this connector out, if one did."""
        if self.skip is not None and not self.skip.admitted:
            return self.skip
        if self.load is not None and not self.load.admitted:
            return self.load
        return None


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, shared by all guarded connectors of the process."""

    request: Any  # vLLM's own, until it has finished
    internal_id: str
    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool
    arrival: int
    seen: int
    anchor: int  # wall minus monotonic, ns
    prompt_tokens: int
    running: int = 0
    waiting: int = 0
    handoff: bool = False
    draw: float = 0.0
    legs: dict[int, Leg] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    load_failed: bool = False
    alloc: int = 0
    scheduled: int = 0
    first: int = 0
    finish: int = 0
    told: bool = False
    output_tokens: int = 0
    error: str = ""
    todo: int = 0  # tokens that it still has to compute before its first one, as far as is known
    away: bool = False  # an asynchronous load is under way: it waits for the link, not for the GPU

    def decided(self) -> tuple[Decision, Leg | None]:
        """The road taken, and the leg it is counted under: the one that was refused, else that loaded, else asked."""
        refused = next((leg for leg in self.legs.values() if leg.refusal is not None), None)
        done = [attempt for attempt in self.attempts if attempt.tokens > 0]
        if refused is not None and refused.refusal is not None:
            others = [a for a in done if a.backend is not refused.backend]
            if others:
                return Decision(semconv.DECISION_OTHER_TIER, refused.refusal.reason), refused
            if not any(a.loaded > 0 for a in done):
                return refused.refusal, refused
        if done:
            last = done[-1]
            leg = next((leg for leg in self.legs.values() if leg.backend is last.backend), None)
            if all(a.failed and a.loaded == 0 for a in done):
                return Decision(semconv.DECISION_DECLINE, gate.LOAD_FAILED), leg
            reason = leg.load.reason if leg is not None and leg.load is not None else gate.NO_DIRECTIVE
            return Decision(semconv.DECISION_REMOTE, reason), leg
        leg = next(iter(self.legs.values()), None)
        covered = leg is not None and 0 < self.prompt_tokens - leg.local <= leg.backend.block_tokens
        return Decision(semconv.DECISION_NONE, gate.LOCAL if covered else gate.MISS), leg
