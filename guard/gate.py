"""The pure decision: may this request read remote KV? Values in, one value out; no clock, no I/O.

Two gates, one set of rules. `admit_lookup` acts before the lookup, when the match is not known: it refuses where
nothing that could be found would be used, or what is expected to be found does not pay. `admit_load` acts when the
match is known. A refusal is `skip` (the connector is not asked at all, where it tolerates that) or `decline` (it is
asked, vLLM is told that nothing matched).

Without a directive everything is admitted: vLLM behaves as without kvguard. `on` and `off` are the operator's word;
`on` still does not send a request into a second load after one that failed. `auto` obeys limits, projections, and what
the hook saw itself in the last seconds (`guard.pace`). `observe` admits everything too and tells in the reason what
`auto` would have done. A hand-off between prefill and decode engines is never refused.
"""

from typing import Final, NamedTuple

from guard import semconv
from guard.classes import class_of
from guard.connectors import LOAD_SYNC, Capability
from guard.costs import IDLE, Traffic
from guard.wire import Directive

NO_DIRECTIVE: Final = "no-directive"
ON: Final = "on"
OFF: Final = "off"
AUTO: Final = "auto"
OBSERVE: Final = "observe"
BYPASS: Final = "bypass"  # the controller keeps everybody out
BREAKER: Final = "breaker"  # reads failed one after another, seen by the hook itself
MIN_TOKENS: Final = "min-tokens"
MAX_INFLIGHT: Final = "max-inflight"
MAX_BYTES: Final = "max-inflight-bytes"
STALLED: Final = "stalled"  # loses by what the hook saw itself: a read in flight is late, or the last ones were slow
PROJECTED: Final = "projected"  # remote is projected to cost more than recomputing
SLA: Final = "sla"  # remote is projected to miss the objective and recomputing to meet it
SHARE: Final = "share"
HOLDOUT: Final = "holdout"  # recomputes so that both roads stay known
TRICKLE: Final = "trickle"  # let through although refused, to see whether the refusal still holds
HANDOFF: Final = "handoff"
LOAD_FAILED: Final = "load-failed"
UNUSABLE: Final = "unusable"  # vLLM would throw the match away, for example with prompt_logprobs
MISS: Final = "miss"
LOCAL: Final = "local"  # vLLM's own cache held it

_LIMITS: Final = (BYPASS, BREAKER, MIN_TOKENS, MAX_INFLIGHT, MAX_BYTES, STALLED, PROJECTED, SLA, SHARE)
_WOULD: Final = {reason: f"would-{reason}" for reason in (*_LIMITS, LOAD_FAILED, UNUSABLE)}
_TRICKLED: Final = frozenset((BYPASS, PROJECTED, SLA, SHARE))
"""Refusals that may have had their day; what the hook saw itself runs out by itself."""

REASONS: Final = (
    NO_DIRECTIVE, ON, OFF, AUTO, OBSERVE, *_LIMITS, HOLDOUT, TRICKLE, HANDOFF, LOAD_FAILED, UNUSABLE, MISS, LOCAL,
    *_WOULD.values(),
)  # fmt: skip
"""Every value that `kvguard.decision.reason` can take here: the label is bounded."""

STATE_BYPASS: Final = "bypass"
STATE_HALF_OPEN: Final = "half-open"


class Decision(NamedTuple):
    """One road and why: `action` is one of semconv.DECISIONS, `reason` one of REASONS."""

    action: str
    reason: str

    @property
    def admitted(self) -> bool:
        """True when the connector may go on."""
        return self.action == semconv.DECISION_REMOTE


_ADMIT: Final = {reason: Decision(semconv.DECISION_REMOTE, reason) for reason in REASONS}
_SKIP: Final = {reason: Decision(semconv.DECISION_SKIP, reason) for reason in REASONS}
_DECLINE: Final = {reason: Decision(semconv.DECISION_DECLINE, reason) for reason in REASONS}
_GUARDED: Final = (semconv.MODE_AUTO, semconv.MODE_OBSERVE)


def admit_lookup(
    directive: Directive | None,
    capability: Capability,
    *,
    prompt_tokens: int,
    local_tokens: int | None,
    token_bytes: float = 0.0,
    traffic: Traffic = IDLE,
    handoff: bool = False,
    load_failed: bool = False,
    unusable: bool = False,
    broken: bool = False,
    trickle_due: bool = False,
    draw: float = 0.0,
) -> Decision:
    """Decides before the lookup. `local_tokens` None: not known yet, the lookup starts at the arrival.

    `draw` is uniform in [0, 1), the same at both gates; `broken` as `Pace.broken`.

    A connector that does not tolerate a skip is always admitted here; `admit_load` refuses it later.
    """
    if directive is None:
        return _ADMIT[NO_DIRECTIVE]
    if handoff or capability.handoff:
        return _ADMIT[HANDOFF]
    mode = directive.mode
    if not capability.skip:
        return _ADMIT[mode]
    if mode == semconv.MODE_OFF:
        return _SKIP[OFF]
    if load_failed:
        return _verdict(mode, "" if capability.ask_after_failure else LOAD_FAILED, _SKIP, False)
    if unusable:
        return _verdict(mode, UNUSABLE, _SKIP, False)
    if mode not in _GUARDED:
        return _ADMIT[mode]
    # At most all that is not local can match.
    reason = _over_limit(directive, prompt_tokens - (local_tokens or 0), 0, traffic, broken)
    costs = directive.costs
    if not reason and costs is not None:
        expected = costs.only or costs.classes.get(class_of(prompt_tokens, traffic.running)) or costs.default
        if expected is not None:
            reason = costs.loses_lookup(
                prompt_tokens, local_tokens, expected, token_bytes or costs.bytes_per_token, traffic,
                capability.load == LOAD_SYNC, capability.lookup_blocks,
            )  # fmt: skip
            if reason and (traffic.overdue or traffic.slowdown > 1.0):
                reason = STALLED
    return _drawn(directive, reason, draw, _SKIP, trickle_due)


def admit_load(
    directive: Directive | None,
    capability: Capability,
    *,
    matched_tokens: int,
    matched_bytes: int = 0,
    prompt_tokens: int = 0,
    local_tokens: int = 0,
    traffic: Traffic = IDLE,
    handoff: bool = False,
    load_failed: bool = False,
    broken: bool = False,
    trickle_due: bool = False,
    trickle: bool = False,
    draw: float = 0.0,
) -> Decision:
    """Decides when the match is known: `matched_tokens` beyond what is local. `trickle`: its lookup was one already."""
    if directive is None:
        return _ADMIT[NO_DIRECTIVE]
    if handoff or capability.handoff:
        return _ADMIT[HANDOFF]
    mode = directive.mode
    if not capability.decline:
        return _ADMIT[mode]
    if mode == semconv.MODE_OFF:
        return _DECLINE[OFF]
    if load_failed:
        return _verdict(mode, LOAD_FAILED, _DECLINE, False)
    if mode not in _GUARDED:
        return _ADMIT[mode]
    if trickle:
        return _ADMIT[TRICKLE]
    reason = _over_limit(directive, matched_tokens, matched_bytes, traffic, broken)
    costs = directive.costs
    if not reason and costs is not None and prompt_tokens > 0:
        size = matched_bytes or matched_tokens * costs.bytes_per_token
        bound = costs.bound
        if costs.bounded:
            expected = costs.classes.get(class_of(prompt_tokens, traffic.running)) or costs.default
            bound = expected.bound if expected is not None else bound
        reason = costs.loses_load(
            prompt_tokens, local_tokens, matched_tokens, size, traffic, capability.load == LOAD_SYNC, bound
        )
        if reason and (traffic.overdue or traffic.slowdown > 1.0):
            reason = STALLED
    return _drawn(directive, reason, draw, _DECLINE, trickle_due)


def _over_limit(directive: Directive, tokens: int, size: int, traffic: Traffic, broken: bool) -> str:
    """The first limit that is crossed, or an empty text. A limit on bytes lets one read through when none is open."""
    reads = directive.reads
    if tokens < reads.min_tokens:
        return MIN_TOKENS
    if directive.state in (STATE_BYPASS, STATE_HALF_OPEN):
        return BYPASS
    if broken:
        return BREAKER
    if reads.max_inflight is not None and traffic.inflight >= reads.max_inflight:
        return MAX_INFLIGHT
    if (
        reads.max_inflight_bytes is not None
        and traffic.inflight
        and traffic.inflight_bytes + size > reads.max_inflight_bytes
    ):
        return MAX_BYTES
    return ""


def _drawn(
    directive: Directive, reason: str, draw: float, refusals: dict[str, Decision], trickle_due: bool
) -> Decision:
    """What the draw adds: the lowest are held out, the highest are outside the share."""
    mode = directive.mode
    if not reason:
        reads = directive.reads
        if reads.holdout <= draw < reads.share:
            return _ADMIT[mode]
        reason = SHARE if draw >= reads.share else HOLDOUT
    return _verdict(mode, reason, refusals, trickle_due)


def _verdict(mode: str, reason: str, refusals: dict[str, Decision], trickle_due: bool) -> Decision:
    if not reason:
        return _ADMIT[mode]
    if mode == semconv.MODE_OBSERVE:
        return _ADMIT[_WOULD.get(reason, OBSERVE)]
    if trickle_due and reason in _TRICKLED:
        return _ADMIT[TRICKLE]
    return refusals[reason]
