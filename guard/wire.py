"""Shapes that cross a process or a folder: spans, directives, joined requests. Standard library only."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guard import semconv
from guard.costs import Costs
from guard.errors import WireError

_TYPE_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}

LEASE_SECONDS = 15.0
"""How long a directive holds without news from the service."""

AttributeValue = str | int | float | bool


@dataclass(slots=True)
class Span:
    """One finished span. Ids are lower-case hex (32 and 16 digits), times are Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    kind: int = 1  # OTLP SpanKind: 1 internal, 3 client
    error: bool = False

    @property
    def seconds(self) -> float:
        """Duration in seconds; negative when the span is broken."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Limits on remote reads. None means no limit.

    `holdout` is the share of requests that recompute so that both roads stay known. `trickle_seconds` lets one read
    that is refused pass every so many seconds, to see whether the refusal still holds; None: none.
    """

    max_inflight: int | None = None
    max_inflight_bytes: int | None = None
    min_tokens: int = 0
    share: float = 1.0
    holdout: float = 0.0
    trickle_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What the service asks of the hook for one backend of one engine. It is a lease and expires.

    `ttl_seconds` is what is left of a manual override (None: no end); with `on_lease_expiry` = `keep` the hook goes on
    applying it for that long after the lease has run out. `fetch`, `prefill`, `classes` and `sla` hold the coefficients
    of `guard.costs`; `costs` is what they mean, None where there are none.
    """

    id: str
    engine_id: str
    backend: str
    mode: str = semconv.MODE_AUTO
    state: str = "open"
    lease_seconds: float = LEASE_SECONDS
    stores: bool = True
    reads: Reads = field(default_factory=Reads)
    fetch: Mapping[str, float] = field(default_factory=dict)
    prefill: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, Any] = field(default_factory=dict)
    sla: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    on_lease_expiry: str = semconv.LEASE_OPEN
    ttl_seconds: float | None = None
    schema: int = semconv.SCHEMA
    costs: Costs | None = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.fetch and self.prefill:
            object.__setattr__(self, "costs", Costs(self.fetch, self.prefill, self.classes, self.sla))

    def to_json(self) -> dict[str, Any]:
        """The directive as the JSON object of the HTTP API."""
        return {
            "schema": self.schema,
            "id": self.id,
            "engine_id": self.engine_id,
            "backend": self.backend,
            "mode": self.mode,
            "state": self.state,
            "lease_seconds": self.lease_seconds,
            "reads": {
                "max_inflight": self.reads.max_inflight,
                "max_inflight_bytes": self.reads.max_inflight_bytes,
                "min_tokens": self.reads.min_tokens,
                "share": self.reads.share,
                "holdout": self.reads.holdout,
                "trickle_seconds": self.reads.trickle_seconds,
            },
            "fetch": dict(self.fetch),
            "prefill": dict(self.prefill),
            "classes": dict(self.classes),
            "sla": dict(self.sla),
            "stores": self.stores,
            "reason": self.reason,
            "on_lease_expiry": self.on_lease_expiry,
            "ttl_seconds": self.ttl_seconds,
        }

    @classmethod
    def from_json(cls, data: object) -> "Directive":
        """Reads a directive; unknown keys are ignored, so that a newer service can add some.

        Raises:
            WireError: a key is missing, of the wrong type or out of range, or the schema is newer than this code.
        """
        if not isinstance(data, dict):
            raise WireError("directive: not an object")
        schema = _get(data, "schema", int, semconv.SCHEMA)
        if schema > semconv.SCHEMA:
            raise WireError(f"directive: schema {schema} is newer than {semconv.SCHEMA}")
        reads = _get(data, "reads", dict, {})
        return cls(
            schema=schema,
            id=_get(data, "id", str),
            engine_id=_get(data, "engine_id", str),
            backend=_get(data, "backend", str),
            mode=_choice(data, "mode", semconv.MODES, semconv.MODE_AUTO),
            state=_get(data, "state", str, "open"),
            lease_seconds=_number(data, "lease_seconds", LEASE_SECONDS, low=1.0, high=3600.0),
            stores=_get(data, "stores", bool, True),
            reads=Reads(
                max_inflight=_optional_count(reads, "max_inflight"),
                max_inflight_bytes=_optional_count(reads, "max_inflight_bytes"),
                min_tokens=_optional_count(reads, "min_tokens") or 0,
                share=_number(reads, "share", 1.0, low=0.0, high=1.0),
                holdout=_number(reads, "holdout", 0.0, low=0.0, high=1.0),
                trickle_seconds=None
                if reads.get("trickle_seconds") is None
                else _number(reads, "trickle_seconds", 0.0, low=0.0, high=3600.0),
            ),
            fetch=_get(data, "fetch", dict, {}),
            prefill=_get(data, "prefill", dict, {}),
            classes=_get(data, "classes", dict, {}),
            sla=_get(data, "sla", dict, {}),
            reason=_get(data, "reason", str, ""),
            on_lease_expiry=_choice(data, "on_lease_expiry", semconv.LEASE_EXPIRY, semconv.LEASE_OPEN),
            ttl_seconds=None
            if data.get("ttl_seconds") is None
            else _number(data, "ttl_seconds", 0.0, low=0.0, high=sys.float_info.max),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveSet:
    """The answer to a hook's poll: one directive per backend of the engine, and the tag to send with the next poll."""

    engine_id: str
    etag: str
    directives: tuple[Directive, ...]
    schema: int = semconv.SCHEMA

    def to_json(self) -> dict[str, Any]:
        """The set as the JSON object of the HTTP API."""
        return {
            "schema": self.schema,
            "engine_id": self.engine_id,
            "etag": self.etag,
            "directives": [directive.to_json() for directive in self.directives],
        }

    @classmethod
    def from_json(cls, data: object) -> "DirectiveSet":
        """Reads the answer to a poll.

        Raises:
            WireError: the object or one of its directives is not of the shape that this code reads.
        """
        if not isinstance(data, dict):
            raise WireError("directives: not an object")
        schema = _get(data, "schema", int)
        if schema > semconv.SCHEMA:
            raise WireError(f"directives: schema {schema} is newer than {semconv.SCHEMA}")
        items = data.get("directives")
        if not isinstance(items, list):
            raise WireError("directives: not a list")
        return cls(
            schema=schema,
            engine_id=_get(data, "engine_id", str),
            etag=_get(data, "etag", str),
            directives=tuple(Directive.from_json(item) for item in items),
        )


def _get(data: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = data.get(key, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WireError(f"{key}: not {_TYPE_NAMES.get(kind, kind.__name__)}")
    return value


def _choice(data: Mapping[str, Any], key: str, allowed: tuple[str, ...], default: str) -> str:
    value = _get(data, key, str, default)
    if value not in allowed:
        raise WireError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
    return str(value)


def _number(data: Mapping[str, Any], key: str, default: float, *, low: float, high: float) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise WireError(f"{key}: not a number from {low:g} to {high:g}")
    return float(value)


def _optional_count(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WireError(f"{key}: not a count of 0 or more")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something worth telling: `kind` is one of semconv.EVENT_KINDS, `at` Unix seconds, `scope` as in the HTTP API."""

    at: float
    kind: str
    scope: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class FetchRecord:
    """One fetch attempt, as its span told it. Times in seconds, sizes in bytes, None where the backend is silent."""

    span_id: str
    attempt: int
    start_ns: int
    seconds: float
    outcome: str
    tokens: int = 0
    blocks: int = 0
    bytes: int = 0
    inflight: int = 0
    round_trips: int | None = None
    network_rtt: float | None = None
    batch: str | None = None
    error_type: str | None = None
    server: str = ""  # host:port of the store, where the connector knows it
    ranks: dict[int, float] = field(default_factory=dict)  # seconds by worker rank, from `kvguard.kv.load`
    reads: int = 0  # `kvguard.kv.read` children
    read_seconds: float = 0.0
    read_bytes: int = 0
    counted: bool = False  # whether the metrics have it: a fetch can come long after its request


@dataclass(slots=True)
class RequestRecord:
    """One request with all that was heard of it: the joined row behind `/v1/correlation` and `/v1/requests/{id}`.

    `intake` to `prefill` are i, q1, u, q2, f, q3, p of TTFT in seconds; `residual` is TTFT minus their sum, where TTFT
    is vLLM's own figure when its `llm_request` span arrived, else the hook's.
    """

    internal_id: str
    request_id: str
    trace_id: str
    span_id: str
    engine_id: str
    model: str
    backend: str
    class_: str
    arrival_ns: int
    prompt_tokens: int
    tokens_local: int
    tokens_matched: int
    tokens_loaded: int
    tokens_computed: int
    ttft: float | None  # None: aborted before a first token
    intake: float
    queue: float
    lookup: float
    slot: float
    fetch: float
    resume: float
    prefill: float
    residual: float | None
    exposed_wait: float
    decision: str
    reason: str
    directive_id: str = ""
    running: int = 0
    waiting: int = 0
    aborted: bool = False
    handoff: bool = False
    simulated: bool = False
    lookup_round_trips: int | None = None
    lookup_polls: int = 0
    fetches: list[FetchRecord] = field(default_factory=list)
    stores: int = 0
    store_bytes: int = 0
    vllm_ttft: float | None = None
    vllm_queue: float | None = None
    vllm_prefill: float | None = None
    vllm_e2e: float | None = None
    server_spans: list[Span] = field(default_factory=list)  # LMCache server's `mp.*`, joined by session id
    output_tokens: int | None = None
    tpot: float | None = None
    rtt: float | None = None  # idle round-trip time to the store when it looked up, seconds: from probes or the fetch
    rtt_source: str = ""  # the prober that measured it, or "fetch"
    propensity: float | None = None  # probability with which the road taken was drawn; None where it was not drawn
    clamped: tuple[str, ...] = ()  # what was out of range as sent and was put right, e.g. hit tokens counted twice

    @property
    def gpu_seconds(self) -> float:
        """Seconds without a first token in which it wanted the GPU, not its KV: q1 + q3 + p."""
        return self.queue + self.resume + self.prefill

    @property
    def miss_latency(self) -> float:
        """Local miss to KV usable, seconds: u + q2 + f."""
        return self.lookup + self.slot + self.fetch
