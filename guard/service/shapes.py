"""The JSON objects of the HTTP API that people read, as the OpenAPI document shows them."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from guard.history.shapes import Entry, Override
from guard.service.switches import override_etag

Mode = Literal["on", "off", "auto", "observe"]
LeaseExpiry = Literal["keep", "open"]
MAX_TTL = 365 * 86_400.0
MAX_REASON = 500
_COPIED = ("scope", "mode", "stores", "on_lease_expiry", "reason", "who")


def plain(text: str) -> str:
    """`text` when it can be shown anywhere.

    Raises:
        ValueError: it holds a control character or half a surrogate pair.
    """
    if not text.isprintable():
        raise ValueError("holds control characters: send one line of plain text")
    return text


Reason = Annotated[str, Field(max_length=MAX_REASON, description="why; kept in the history"), AfterValidator(plain)]


class SwitchIn(BaseModel):
    """What an operator asks for."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"mode": "off", "ttl_seconds": 1800, "reason": "INC-1234: store fails over"}]},
    )

    mode: Mode
    stores: Annotated[bool, Field(description="false also stops writes to the remote tier, where it can be done")] = (
        True
    )
    ttl_seconds: Annotated[float | None, Field(gt=0, le=MAX_TTL, description="the switch ends after it")] = None
    on_lease_expiry: Annotated[
        LeaseExpiry | None,
        Field(description="what hooks do when they cannot reach kvguard; default keep for off, else open"),
    ] = None
    reason: Reason = ""


class OverrideOut(BaseModel):
    """A switch that is in force for a scope."""

    scope: str
    mode: Mode
    stores: bool
    on_lease_expiry: LeaseExpiry
    ttl_seconds: float | None
    expires_at: datetime | None
    reason: str
    who: str
    since: datetime
    etag: str

    @classmethod
    def of(cls, override: Override, now: float) -> "OverrideOut":
        """The override as it is at Unix time `now`."""
        return cls.model_validate(
            {
                **{name: getattr(override, name) for name in _COPIED},
                "ttl_seconds": left(override.expires_at, now),
                "expires_at": at(override.expires_at),
                "since": at(override.since),
                "etag": override_etag(override),
            }
        )


class Switched(BaseModel):
    """The answer to a switch: what is in force, and the live engines that it concerns."""

    scope: str
    override: OverrideOut | None
    engines: Annotated[int, Field(description="live engines in the scope")]
    shadowed: Annotated[int, Field(description="engine and backend pairs among them where a narrower switch holds")]
    acknowledged: list[str] = []
    pending: list[str] = []


class LimitOut(BaseModel):
    """Limits on remote reads that the controller asks for; null: none."""

    max_inflight: int | None
    max_inflight_bytes: int | None
    min_tokens: int
    share: float
    holdout: float
    trickle_seconds: float | None


class ProjectedOut(BaseModel):
    """Projected TTFT of the class's reference request on both roads, seconds; null: no model yet."""

    remote: float | None
    recompute: float | None
    remote_tail: Annotated[float | None, Field(description="at the objective's percentile, else p95")]
    recompute_tail: float | None
    attainable: Annotated[bool, Field(description="false: neither road meets the objective")]
    source: Literal["projected"] = "projected"
    n: Annotated[int, Field(description="requests behind the models")]


class WouldOut(BaseModel):
    """Under observe: requests that auto would have refused, and the seconds that would have gained, as projected."""

    requests: int
    gained_seconds: float


class StandingOut(BaseModel):
    """How the objective stood over the last minutes; measured."""

    ttft_seconds: float
    percentile: float
    met: int
    missed: int
    attained: float | None
    burn_rate: float | None
    goodput_per_second: float
    seconds: float


class ControlOut(BaseModel):
    """What the controller knows of an engine and backend, and what it asks for."""

    reason: str
    inflight: int
    inflight_bytes: int
    oldest_age_seconds: float
    pace: Annotated[float, Field(description="how many times the modelled time the last reads took")]
    rtt_seconds: float | None
    reachable: Annotated[bool | None, Field(description="whether probes are answered; null: nobody probes")]
    objective: StandingOut | None
    would: WouldOut


class EngineRow(BaseModel):
    """One engine and backend: what is asked of it and whether its hook does it."""

    engine_id: str
    backend: str
    model: str
    mode: Mode
    scope: Annotated[str | None, Field(description="whose switch holds, the narrowest; null: the default")]
    who: Annotated[str | None, Field(description="who set that switch")]
    state: Annotated[
        Literal["open", "limited", "bypass", "half-open"],
        Field(description="of the controller; under observe what it would be under auto"),
    ]
    state_since: datetime | None
    projected: ProjectedOut | None
    limit: LimitOut | None
    verdict: dict[str, str] | None
    control: Annotated[ControlOut | None, Field(description="what the controller knows; null: nothing yet")]
    stores: bool
    directive_id: str
    acknowledged: bool
    acknowledged_at: datetime | None
    last_poll_age_seconds: float
    silent: Annotated[bool, Field(description="not heard of for longer than a lease")]
    reason: str
    since: datetime | None
    ttl_seconds: float | None
    hook_version: str
    instance: str


class OffloadOut(BaseModel):
    """Everything about the switches: those in force, and every engine and backend."""

    default_mode: Mode
    overrides: list[OverrideOut]
    engines: list[EngineRow]


class SwitchOut(BaseModel):
    """One entry of the history: a switch, or what the controller did by itself (`who` is then `kvguard`).

    `mode` to `expires_at` are those that were set or, by `clear` and `expire`, taken away.
    """

    id: int
    at: datetime
    action: Annotated[str, Field(description="set, clear, expire; controller, sla; objective")]
    scope: str
    who: str
    source: Annotated[str, Field(description="address that the call came from")]
    reason: str
    mode: Mode | None = None
    stores: bool | None = None
    on_lease_expiry: LeaseExpiry | None = None
    expires_at: datetime | None = None
    before: Annotated[dict[str, Any] | None, Field(description="what held before; null: nothing")]
    after: Annotated[dict[str, Any] | None, Field(description="what holds after; null: nothing")]
    evidence: Annotated[dict[str, Any] | None, Field(description="what the controller knew")]

    @classmethod
    def of(cls, entry: Entry) -> "SwitchOut":
        """The entry as JSON."""
        told = (entry.after or entry.before or {}) if entry.action in ("set", "clear", "expire") else {}
        fields = {name: getattr(entry, name) for name in Entry.__slots__}
        return cls.model_validate({**told, **fields, "at": at(entry.at), "expires_at": at(told.get("expires_at"))})


class HistoryOut(BaseModel):
    """Entries, newest first; `next_before` asks for older ones, null at the end."""

    switches: list[SwitchOut]
    next_before: int | None


class RequestRow(BaseModel):
    """What a list shows of a request; times in seconds, measured."""

    internal_id: str
    request_id: str
    trace_id: str
    engine_id: str
    model: str
    backend: str
    class_: Annotated[str, Field(alias="class")]
    arrival: datetime
    decision: str
    reason: str
    aborted: bool
    simulated: bool
    tokens: dict[str, int | None]
    ttft_seconds: float | None
    miss_latency_seconds: float
    exposed_wait_seconds: float
    parts: Annotated[dict[str, float], Field(description="the seven parts of TTFT")]
    failed_fetches: int
    source: Literal["measured"]


class RequestsOut(BaseModel):
    """A page of requests; `next_cursor` asks for the next, null at the end."""

    requests: list[RequestRow]
    next_cursor: str | None


def at(seconds: float | None) -> datetime | None:
    """Unix seconds as a time in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def left(expires_at: float | None, now: float) -> float | None:
    """Seconds until `expires_at`, not below 0."""
    return None if expires_at is None else max(0.0, round(expires_at - now, 3))
