"""`/v1/objectives`: what is promised, and how it stands."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from guard.service import shapes
from guard.service.auth import require
from guard.service.problems import Problem
from guard.service.runtime import Runtime
from guard.slo.objective import ObjectiveError, parse

router = APIRouter(prefix="/v1/objectives", tags=["objectives"])
Reader = Annotated[str, Depends(require("read"))]
Admin = Annotated[str, Depends(require("admin"))]
IfMatch = Annotated[str, Header(description="only while the objectives in force still have this ETag")]


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
async def get_objectives(request: Request, response: Response, _: Reader) -> ObjectivesOut:
    """The objectives in force, with their ETag."""
    return _shown(request.app.state.runtime, response)


@router.put("", response_model=ObjectivesOut)
async def put_objectives(
    request: Request, response: Response, wanted: ObjectivesIn, who: Admin, if_match: IfMatch = ""
) -> ObjectivesOut:
    """Replaces all objectives; answers when they are on disk."""
    runtime: Runtime = request.app.state.runtime
    try:
        items = parse(wanted.objectives)
    except ObjectiveError as error:
        raise Problem(422, str(error), kind="bad-objective") from None
    await runtime.promises.put(
        items, at=runtime.clock.wall(), who=who, source=_source(request), reason=wanted.reason, if_match=if_match
    )
    return _shown(runtime, response)


@router.delete("", response_model=ObjectivesOut)
async def delete_objectives(
    request: Request,
    response: Response,
    who: Admin,
    reason: Annotated[shapes.Reason, Query()] = "",
    if_match: IfMatch = "",
) -> ObjectivesOut:
    """Goes back to the objectives of the settings."""
    runtime: Runtime = request.app.state.runtime
    await runtime.promises.clear(
        at=runtime.clock.wall(), who=who, source=_source(request), reason=reason, if_match=if_match
    )
    return _shown(runtime, response)


def _shown(runtime: Runtime, response: Response) -> ObjectivesOut:
    promises = runtime.promises
    response.headers["ETag"] = promises.etag
    return ObjectivesOut.model_validate(
        {"source": promises.source, "objectives": [item.to_json() for item in promises.in_force.items]}
    )


def _source(request: Request) -> str:
    return request.client.host if request.client else ""
