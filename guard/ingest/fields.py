"""Which spans and attributes are read, and which values are sane.

Attributes that are not in this table are dropped while decoding, so that a span costs what we need from it and no
more. LMCache's `mp.*` spans are only shown to people: of them every scalar is kept, up to `MAX_FREE_ATTRIBUTES`.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from guard import semconv as s
from guard.wire import AttributeValue

TEXT, COUNT, SECONDS, FLAG = range(4)
MAX_TEXT: Final = 1024
MAX_COUNT: Final = 1 << 50
MAX_SECONDS: Final = 7 * 86400.0
MAX_FREE_ATTRIBUTES: Final = 32
MAX_RESOURCE_ATTRIBUTES: Final = 128

KINDS: Final[dict[str, int]] = {
    **dict.fromkeys(
        (s.REQUEST_ID, s.REQUEST_MODEL, s.SERVER_ADDRESS, s.ERROR_TYPE, s.INTERNAL_ID, s.ENGINE_ID, s.BACKEND,
         s.DECISION, s.DECISION_REASON, s.DIRECTIVE_ID, s.OUTCOME, s.BATCH, s.OPERATION), TEXT,
    ),
    **dict.fromkeys(
        (s.INPUT_TOKENS, s.OUTPUT_TOKENS, s.SERVER_PORT, s.RANK, s.TOKENS, s.TOKENS_LOCAL, s.TOKENS_MATCHED,
         s.TOKENS_LOADED, s.TOKENS_COMPUTED, s.RUNNING, s.WAITING, s.POLLS, s.ATTEMPT, s.BLOCKS, s.BYTES, s.INFLIGHT,
         s.ROUND_TRIPS, s.KEYS), COUNT,
    ),
    **dict.fromkeys(
        (*s.TIME_PARTS, s.TTFT, s.EXPOSED_WAIT, s.NETWORK_RTT, s.TPOT, s.VLLM_TTFT, s.VLLM_QUEUE, s.VLLM_PREFILL,
         s.VLLM_E2E, s.PROPENSITY), SECONDS,
    ),
    **dict.fromkeys((s.ABORTED, s.HANDOFF, s.SIMULATED), FLAG),
}  # fmt: skip
"""Every attribute that is read, and what its value must be."""

REPEATING: Final = frozenset(KINDS) - {
    key for key, kind in KINDS.items() if kind == SECONDS or key in (s.REQUEST_ID, s.INTERNAL_ID, s.BATCH)
}
"""Attributes whose values come again: the decoded form is remembered, so that all spans share one object."""

REPEATING_SPANS: Final = frozenset((s.SPAN_READ, s.SPAN_LOAD))
"""Spans whose attributes as a whole come again."""

OURS: Final = frozenset(
    (s.SPAN_REQUEST, s.SPAN_LOOKUP, s.SPAN_FETCH, s.SPAN_LOAD, s.SPAN_READ, s.SPAN_STORE, s.SPAN_DECODE,
     s.SPAN_VLLM_REQUEST)
)  # fmt: skip
"""Spans that the join uses, besides those that begin with `mp.`."""

REQUIRED: Final[dict[str, tuple[str, ...]]] = {s.SPAN_REQUEST: (s.INPUT_TOKENS,)}
"""Attributes without which a span says nothing."""

_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
EARLIEST_NS: Final = 1_577_836_800 * 10**9  # 2020-01-01
LATEST_NS: Final = 4_102_444_800 * 10**9  # 2100-01-01


def from_server(name: str) -> bool:
    """Whether a span is one of LMCache's server, with a name that can be kept."""
    return name.startswith(s.LMCACHE_SPAN_PREFIX) and len(name) <= MAX_TEXT


def check(key: str, kind: int, value: AttributeValue | None) -> tuple[AttributeValue | None, str]:
    """The value in its proper type and an empty text, or None and what is wrong with it."""
    problem = ""
    if kind == TEXT:
        if not isinstance(value, str):
            problem = "is not text"
        elif len(value) > MAX_TEXT:
            problem = "is too long"
    elif kind == FLAG:
        problem = "" if isinstance(value, bool) else "is not true or false"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        problem = "is not a number"
    elif value < 0:
        problem = "is negative"
    elif kind == SECONDS:
        value, problem = float(value), "" if value <= MAX_SECONDS else "is absurd"
    elif value != value or value > MAX_COUNT:
        problem = "is absurd"
    elif isinstance(value, float):
        problem = "" if value.is_integer() else "is not an integer"
        value = int(value)
    return (None, f"{key} {problem}") if problem else (value, "")


def times_problem(start_ns: int, end_ns: int, earliest_ns: int, latest_ns: int) -> str:
    """What is wrong with a span's times; empty when nothing is."""
    if end_ns < start_ns:
        return "ends before its start"
    if start_ns < earliest_ns or end_ns > latest_ns:
        return "lies absurdly far in the past or future"
    return ""


def ids_problem(trace_id: str, span_id: str, parent_id: str) -> str:
    """What is wrong with a span's ids, given in hex; empty when nothing is."""
    if len(trace_id) != 32 or len(span_id) != 16 or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return "has no proper trace id or span id"
    if parent_id and len(parent_id) != 16:
        return "has no proper parent id"
    return ""


def resource_of(pairs: Iterable[tuple[str, AttributeValue | None]]) -> dict[str, AttributeValue]:
    """A resource's scalars, cut to `MAX_TEXT` and to `MAX_RESOURCE_ATTRIBUTES`: they become keys that are kept."""
    return {
        key: value[:MAX_TEXT] if isinstance(value, str) else value
        for key, value in islice(pairs, MAX_RESOURCE_ATTRIBUTES)
        if value is not None and len(key) <= MAX_TEXT
    }


def missing_problem(name: str, attributes: dict[str, AttributeValue]) -> str:
    """Which required attribute the span lacks; empty when none."""
    for key in REQUIRED.get(name, ()):
        if key not in attributes:
            return f"{key} is missing"
    return ""
