"""`/v1/probes`: round-trip times to the configured targets. There is no way to probe another one by HTTP."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from guard.service.auth import require
from guard.service.runtime import Runtime
from guard.service.shapes import at

router = APIRouter(prefix="/v1", tags=["probes"])
Reader = Annotated[str, Depends(require("read"))]


class RttOut(BaseModel):
    """RTT of the last minute, seconds; null where nothing was answered. Low and high: 95 % interval of the median."""

    n: int
    p50: float | None
    p50_low: float | None
    p50_high: float | None
    p99: float | None
    min: float | None
    jitter: Annotated[float | None, Field(description="mean difference of neighbours (RFC 3393)")]


class CrossedOut(BaseModel):
    """A shift of the idle RTT: told at `at`, begun at `since`."""

    at: datetime | None
    since: datetime
    before_seconds: float
    after_seconds: float


class CrossingOut(BaseModel):
    """The plateau that the idle RTT is on, and the last shift since the service started."""

    level_seconds: float | None
    last: CrossedOut | None


class ProbeOut(BaseModel):
    """One target."""

    target: str
    prober: str
    backend: str | None
    source: str
    interval_seconds: float
    count: int
    at: Annotated[datetime | None, Field(description="the last round")]
    problem: Annotated[str, Field(description="why nothing is measured now; empty where it is")]
    idle_seconds: Annotated[float | None, Field(description="least RTT of the last rounds")]
    rtt_seconds: RttOut
    sent: int
    loss_ratio: Annotated[float | None, Field(description="null where nothing was sent")]
    facts: Annotated[dict[str, float], Field(description="what else the last round saw, by name with its unit")]
    crossing: CrossingOut


class ProbesOut(BaseModel):
    """All targets, in the order in which they are believed."""

    probes: list[ProbeOut]


@router.get("/probes")
async def get_probes(request: Request, _: Reader) -> ProbesOut:
    """Round-trip times to the configured targets, and where each has shifted."""
    runtime: Runtime = request.app.state.runtime
    rows = runtime.probing.rows()
    for row in rows:
        row["at"] = at(row["at"])
        last = row["crossing"]["last"]
        if last is not None:
            last["at"], last["since"] = at(last["at"]), at(last["since"])
    return ProbesOut.model_validate({"probes": rows})
