"""The JSON objects of the HTTP API that people read, as the OpenAPI document shows them."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from guard.history.ledger import Override, Switch
from guard.service.switches import override_etag

Mode = Literal["on", "off", "auto", "observe"]
LeaseExpiry = Literal["keep", "open"]
MAX_TTL = 365 * 86_400.0
_COPIED = ("scope", "mode", "stores", "on_lease_expiry", "reason", "who")


class SwitchIn(BaseModel):
    """What an operator asks for."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    mode: Mode
    stores: Annotated[bool, Field(description="false also stops writes to the remote tier, where it can be done")] = (
        True
    )
    ttl_seconds: Annotated[float | None, Field(gt=0, le=MAX_TTL, description="the switch ends after it")] = None
    on_lease_expiry: Annotated[
        LeaseExpiry | None,
        Field(description="what hooks do when they cannot reach kvguard; default keep for off, else open"),
    ] = None
    reason: Annotated[str, Field(max_length=500)] = ""


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


class EngineRow(BaseModel):
    """One engine and backend: what is asked of it and whether its hook does it."""

    engine_id: str
    backend: str
    model: str
    mode: Mode
    scope: Annotated[str | None, Field(description="whose switch holds; null: the default")]
    state: Literal["open", "bypass"]
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
    """One entry of the history."""

    id: int
    at: datetime
    action: Literal["set", "clear", "expire"]
    scope: str
    mode: Mode
    stores: bool
    on_lease_expiry: LeaseExpiry
    expires_at: datetime | None
    reason: str
    who: str

    @classmethod
    def of(cls, switch: Switch) -> "SwitchOut":
        """The entry as JSON."""
        return cls.model_validate(
            {**{name: getattr(switch, name) for name in cls.model_fields}, "at": at(switch.at),
             "expires_at": at(switch.expires_at)}
        )  # fmt: skip


class HistoryOut(BaseModel):
    """Switches, newest first; `next_before` asks for older ones, null at the end."""

    switches: list[SwitchOut]
    next_before: int | None


def at(seconds: float | None) -> datetime | None:
    """Unix seconds as a time in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def left(expires_at: float | None, now: float) -> float | None:
    """Seconds until `expires_at`, not below 0."""
    return None if expires_at is None else max(0.0, round(expires_at - now, 3))
