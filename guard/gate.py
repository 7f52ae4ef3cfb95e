"""The pure decision: may this request read remote KV? Values in, one value out; no clock, no I/O.

Two gates, one set of rules. `admit_lookup` acts before the lookup, when the match is not known: it refuses where
nothing that could be found would be used. `admit_load` acts when the match is known. A refusal is `skip` (the
connector is not asked at all, where it tolerates that) or `decline` (it is asked, vLLM is told that nothing matched).

Without a directive everything is admitted: vLLM behaves as without kvguard. `observe` admits everything too and tells
in the reason what `auto` would have done. A hand-off between prefill and decode engines is never refused.
"""

from typing import Final, NamedTuple

from guard import semconv
from guard.connectors import Capability
from guard.wire import Directive

NO_DIRECTIVE: Final = "no-directive"
ON: Final = "on"
OFF: Final = "off"
AUTO: Final = "auto"
OBSERVE: Final = "observe"
MIN_TOKENS: Final = "min-tokens"
MAX_INFLIGHT: Final = "max-inflight"
MAX_BYTES: Final = "max-inflight-bytes"
SHARE: Final = "share"
HANDOFF: Final = "handoff"
LOAD_FAILED: Final = "load-failed"
UNUSABLE: Final = "unusable"  # vLLM would throw the match away, for example with prompt_logprobs
MISS: Final = "miss"
LOCAL: Final = "local"  # vLLM's own cache held it

_LIMITS: Final = (MIN_TOKENS, MAX_INFLIGHT, MAX_BYTES, SHARE)
_WOULD: Final = {reason: f"would-{reason}" for reason in (*_LIMITS, LOAD_FAILED, UNUSABLE)}

REASONS: Final = (
    NO_DIRECTIVE, ON, OFF, AUTO, OBSERVE, *_LIMITS, HANDOFF, LOAD_FAILED, UNUSABLE, MISS, LOCAL, *_WOULD.values(),
)  # fmt: skip
"""Every value that `kvguard.decision.reason` can take here: the label is bounded."""


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


def admit_lookup(
    directive: Directive | None,
    capability: Capability,
    *,
    prompt_tokens: int,
    local_tokens: int,
    inflight: int = 0,
    inflight_bytes: int = 0,
    handoff: bool = False,
    load_failed: bool = False,
    unusable: bool = False,
    draw: float = 0.0,
) -> Decision:
    """Decides before the lookup. `draw` is uniform in [0, 1); sizes in tokens and bytes, in-flight reads as counts.

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
        reason = "" if capability.ask_after_failure else LOAD_FAILED
    elif unusable:
        reason = UNUSABLE
    else:
        # At most all that is not local can match.
        reason = _over_limit(directive, prompt_tokens - local_tokens, 0, inflight, inflight_bytes, draw)
    return _verdict(mode, reason, _SKIP)


def admit_load(
    directive: Directive | None,
    capability: Capability,
    *,
    matched_tokens: int,
    matched_bytes: int = 0,
    inflight: int = 0,
    inflight_bytes: int = 0,
    handoff: bool = False,
    load_failed: bool = False,
    draw: float = 0.0,
) -> Decision:
    """Decides when the match is known: `matched_tokens` beyond what is local."""
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
        reason = LOAD_FAILED
    else:
        reason = _over_limit(directive, matched_tokens, matched_bytes, inflight, inflight_bytes, draw)
    return _verdict(mode, reason, _DECLINE)


def _over_limit(directive: Directive, tokens: int, size: int, inflight: int, inflight_bytes: int, draw: float) -> str:
    """The first limit that is crossed, or an empty text. A limit on bytes lets one read through when none is open."""
    reads = directive.reads
    if tokens < reads.min_tokens:
        return MIN_TOKENS
    if reads.max_inflight is not None and inflight >= reads.max_inflight:
        return MAX_INFLIGHT
    if reads.max_inflight_bytes is not None and inflight and inflight_bytes + size > reads.max_inflight_bytes:
        return MAX_BYTES
    if draw >= reads.share:
        return SHARE
    return ""


def _verdict(mode: str, reason: str, refusals: dict[str, Decision]) -> Decision:
    if not reason:
        return _ADMIT[mode]
    if mode == semconv.MODE_OBSERVE:
        return _ADMIT[_WOULD[reason]]
    return refusals[reason]
