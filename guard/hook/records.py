"""What the ring holds of requests: on an engine thread a record is only made, `spans()` formats on the drain thread."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from guard import gate, semconv
from guard.hook.requests import Attempt, Backend, Leg, RequestState
from guard.hook.spans import CLIENT, hex_id, make_span, seconds
from guard.wire import AttributeValue, Span

_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")


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
