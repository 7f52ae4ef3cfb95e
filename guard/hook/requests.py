"""What is known of one request while it lives in the engine, and the spans that tell of it afterwards.

Times are `time.monotonic_ns`; each request carries one anchor that turns them into wall time, so that a step of the
wall clock moves a request as a whole and never makes a negative duration. Engine threads only set fields; everything
that formats runs in `spans()`, on the drain thread.

    arrival -i-> seen -q1-> lookup_start -u-> lookup_end -q2-> alloc -f-> usable -q3-> scheduled -p-> first

u ends with the answer that was used first. f is the sum of the fetch attempts, each from blocks allocated to KV
usable. Where a load is synchronous the request is scheduled before its KV is usable: q3 is 0 and p starts at usable.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from guard import gate, semconv
from guard.connectors import Capability
from guard.gate import Decision
from guard.hook.spans import CLIENT, hex_id, make_span, seconds
from guard.wire import AttributeValue, Span

_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")


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


@dataclass(frozen=True, slots=True)
class Scope:
    """What every span of this engine says: engine, model, and which ids may leave."""

    engine_id: str
    model: str
    request_ids: bool = True
    strip_suffix: bool = True  # vLLM appends 8 hex digits to the client's id
    salt: bytes = b""

    def ids(self, internal_id: str) -> dict[str, AttributeValue]:
        """The id attributes: vLLM's external and internal id, or one salted hash where ids are turned off."""
        if not self.request_ids:
            return {semconv.INTERNAL_ID: hidden(internal_id, self.salt)}
        external = _SUFFIX.sub("", internal_id) if self.strip_suffix else internal_id
        return {semconv.REQUEST_ID: external, semconv.INTERNAL_ID: internal_id}


def hidden(internal_id: str, salt: bytes) -> str:
    """A request id as 16 hex digits that cannot be turned back; stable within one process group."""
    import hashlib

    return hashlib.blake2b(internal_id.encode(), key=salt[:64], digest_size=8).hexdigest()


@dataclass(slots=True)
class RequestRecord:
    """A request that has its first token, or ended without one: request, lookup and fetch spans."""

    state: RequestState
    scope: Scope
    attempts: tuple[Attempt, ...]  # those that are over
    open_attempts: tuple[Attempt, ...]
    end: int

    def spans(self) -> Iterator[Span]:
        """Spans of the request, its lookups and the fetch attempts that were over."""
        state = self.state
        scope = self.scope
        decision, leg = state.decided()
        attributes = scope.ids(state.internal_id)
        attributes.update(
            {
                semconv.REQUEST_MODEL: scope.model,
                semconv.ENGINE_ID: scope.engine_id,
                semconv.INPUT_TOKENS: state.prompt_tokens,
                semconv.DECISION: decision.action,
                semconv.DECISION_REASON: decision.reason,
                semconv.RUNNING: state.running,
                semconv.WAITING: state.waiting,
            }
        )
        attributes.update(self._tokens())
        attributes.update(self._times())
        if leg is not None:
            attributes[semconv.BACKEND] = leg.backend.label
            if leg.directive_id:
                attributes[semconv.DIRECTIVE_ID] = leg.directive_id
            if leg.propensity and decision.reason in (gate.AUTO, gate.HOLDOUT):
                attributes[semconv.PROPENSITY] = leg.propensity
        if state.first:
            attributes[semconv.TTFT] = seconds(state.first - state.arrival)
        else:
            attributes[semconv.ABORTED] = True
            if state.error:
                attributes[semconv.ERROR_TYPE] = state.error
        if state.handoff:
            attributes[semconv.HANDOFF] = True
        yield make_span(
            state, semconv.SPAN_REQUEST, state.span_id, state.parent_id, state.arrival, self.end, attributes
        )
        for each in state.legs.values():
            if each.polls:
                yield self._lookup(each)
        for attempt in self.attempts:
            yield fetch_span(state, attempt, scope)

    def _tokens(self) -> dict[str, AttributeValue]:
        state = self.state
        local = max((leg.local for leg in state.legs.values()), default=0)
        matched = max((leg.matched for leg in state.legs.values()), default=0)
        loaded = next((a.loaded for a in reversed(state.attempts) if a.loaded > 0), 0)
        prompt = state.prompt_tokens
        local = min(max(local, 0), prompt)
        loaded = min(max(loaded, 0), prompt - local)
        return {
            semconv.TOKENS_LOCAL: local,
            semconv.TOKENS_MATCHED: min(max(matched, 0), prompt - local),
            semconv.TOKENS_LOADED: loaded,
            semconv.TOKENS_COMPUTED: prompt - local - loaded,
        }

    def _times(self) -> dict[str, AttributeValue]:
        state = self.state
        end = self.end
        seen = [leg for leg in state.legs.values() if leg.first_poll]
        asked = [leg for leg in seen if leg.polls]  # a skipped lookup takes no time
        lookup_start = min((leg.first_poll for leg in asked or seen), default=0) or min(state.alloc or end, end)
        ended = [leg.end for leg in asked if leg.end]
        lookup_end = max(ended) if ended and len(ended) == len(asked) else (end if asked else lookup_start)
        alloc = state.alloc or end
        fetch = sum(max(0, a.end - a.start) for a in self.attempts)
        fetch += sum(max(0, end - a.start) for a in self.open_attempts)
        usable = end if self.open_attempts else max((a.end for a in self.attempts), default=alloc)
        scheduled = state.scheduled or end
        lookup = seconds(lookup_end - lookup_start)
        return {
            semconv.TIME_INTAKE: seconds(state.seen - state.arrival),
            semconv.TIME_QUEUE: seconds(lookup_start - state.seen),
            semconv.TIME_LOOKUP: lookup,
            semconv.TIME_SLOT: seconds(alloc - lookup_end),
            semconv.TIME_FETCH: seconds(fetch),
            semconv.TIME_RESUME: seconds(scheduled - usable),
            semconv.TIME_PREFILL: seconds(end - max(scheduled, usable)),
            # A recompute waits for its blocks as well, so q2 is no price of the remote road.
            semconv.EXPOSED_WAIT: lookup + seconds(fetch),
        }

    def _lookup(self, leg: Leg) -> Span:
        state = self.state
        attributes = _common(state, self.scope, leg.backend)
        attributes[semconv.TOKENS] = leg.matched
        attributes[semconv.POLLS] = leg.polls
        if leg.round_trips >= 0:
            attributes[semconv.ROUND_TRIPS] = leg.round_trips
        refusal = leg.refusal
        attributes[semconv.DECISION] = refusal.action if refusal else semconv.DECISION_REMOTE
        end = leg.end or self.end
        return make_span(state, semconv.SPAN_LOOKUP, leg.span_id, state.span_id, leg.start, end, attributes, CLIENT)


@dataclass(slots=True)
class FetchRecord:
    """A fetch that ended after its request was told: its client had gone, or it was loaded again after preemption."""

    state: RequestState
    attempt: Attempt
    scope: Scope

    def spans(self) -> Iterator[Span]:
        """One fetch span."""
        yield fetch_span(self.state, self.attempt, self.scope)


@dataclass(slots=True)
class DecodeRecord:
    """A request that has finished after its first token."""

    state: RequestState
    scope: Scope

    def spans(self) -> Iterator[Span]:
        """The decode span: first token to finish."""
        state = self.state
        attributes = self.scope.ids(state.internal_id)
        attributes[semconv.ENGINE_ID] = self.scope.engine_id
        attributes[semconv.OUTPUT_TOKENS] = state.output_tokens
        if state.output_tokens > 1:
            attributes[semconv.TPOT] = seconds(state.finish - state.first) / (state.output_tokens - 1)
        if state.error:
            attributes[semconv.ERROR_TYPE] = state.error
        span_id = state.span_id ^ 0x5DEC0DE  # its own id without asking for one on the engine thread
        yield make_span(state, semconv.SPAN_DECODE, span_id, state.span_id, state.first, state.finish, attributes)


def fetch_span(state: RequestState, attempt: Attempt, scope: Scope) -> Span:
    """The span of one fetch attempt."""
    backend = attempt.backend
    attributes = _common(state, scope, backend)
    blocks = -(-attempt.tokens // backend.block_tokens)
    attributes.update(
        {
            semconv.TOKENS: attempt.tokens,
            semconv.ATTEMPT: attempt.number,
            semconv.BLOCKS: blocks,
            semconv.INFLIGHT: attempt.inflight,
            semconv.OUTCOME: attempt.outcome,
        }
    )
    if backend.token_bytes:
        attributes[semconv.BYTES] = attempt.tokens * backend.token_bytes
    if attempt.failed:
        attributes[semconv.ERROR_TYPE] = attempt.error or "load"
        attributes[semconv.TOKENS_LOADED] = attempt.loaded
    if attempt.batch:
        attributes[semconv.BATCH] = hex_id(attempt.batch, 16)
    end = attempt.end or attempt.start
    span = make_span(state, semconv.SPAN_FETCH, attempt.span_id, state.span_id, attempt.start, end, attributes, CLIENT)
    span.error = attempt.failed
    return span


def _common(state: RequestState, scope: Scope, backend: Backend) -> dict[str, AttributeValue]:
    ids = scope.ids(state.internal_id)
    attributes: dict[str, AttributeValue] = {
        semconv.INTERNAL_ID: ids[semconv.INTERNAL_ID],
        semconv.ENGINE_ID: scope.engine_id,
        semconv.BACKEND: backend.label,
    }
    if backend.address:
        attributes[semconv.SERVER_ADDRESS] = backend.address
        if backend.port:
            attributes[semconv.SERVER_PORT] = backend.port
    if state.handoff:
        attributes[semconv.HANDOFF] = True
    return attributes
