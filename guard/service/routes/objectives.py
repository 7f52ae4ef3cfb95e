"""`/v1/objectives`: what is promised, and how it stands."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from guard.service import shapes
from guard.service.auth import require
from guard.service.problems import Problem
from guard.service.runtime import Runtime
from guard.slo.objective import ObjectiveError, parse

router = APIRouter(prefix="/v1/objectives", tags=["objectives"])
Reader = Annotated[str, Depends(require("read"))]
Admin = Annotated[str, Depends(require("admin"))]


class ObjectivesIn(BaseModel):
    """All objectives; they replace those in force."""

    model_config = ConfigDict(extra="forbid")

    objectives: Annotated[
        list[dict[str, Any]], Field(description="model, class (* for all), ttft_seconds, percentile, tpot_seconds")
    ]
    reason: shapes.Reason = ""


class ObjectiveOut(BaseModel):
    """One objective; `*` stands for every model or class that has none of its own."""

    model: str
    class_: Annotated[str, Field(alias="class")]
    ttft_seconds: float
    percentile: float
    tpot_seconds: float | None


class ObjectivesOut(BaseModel):
    """The objectives in force."""

    source: Annotated[Literal["settings", "operator"], Field(description="who set them")]
    objectives: list[ObjectiveOut]


@router.get("", response_model=ObjectivesOut)
async def get_objectives(request: Request, _: Reader) -> ObjectivesOut:
    """The objectives in force."""
    return _shown(request.app.state.runtime)


@router.put("", response_model=ObjectivesOut)
async def put_objectives(request: Request, wanted: ObjectivesIn, who: Admin) -> ObjectivesOut:
    """Replaces all objectives; answers when they are on disk."""
    runtime: Runtime = request.app.state.runtime
    try:
        items = parse(wanted.objectives)
    except ObjectiveError as error:
        raise Problem(422, str(error), kind="bad-objective") from None
    await runtime.promises.put(items, at=runtime.clock.wall(), who=who, source=_source(request), reason=wanted.reason)
    return _shown(runtime)


@router.delete("", response_model=ObjectivesOut)
async def delete_objectives(
    request: Request, who: Admin, reason: Annotated[shapes.Reason, Query()] = ""
) -> ObjectivesOut:
    """Goes back to the objectives of the settings."""
    runtime: Runtime = request.app.state.runtime
    await runtime.promises.clear(at=runtime.clock.wall(), who=who, source=_source(request), reason=reason)
    return _shown(runtime)


def _shown(runtime: Runtime) -> ObjectivesOut:
    promises = runtime.promises
    return ObjectivesOut.model_validate(
        {"source": promises.source, "objectives": [item.to_json() for item in promises.in_force.items]}
    )


def _source(request: Request) -> str:
    return request.client.host if request.client else ""
