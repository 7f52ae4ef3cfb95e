"""`/v1/correlation`: where TTFT goes; `/v1/requests/{id}`: one request explained. From the window in memory."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from guard.correlate.attribution import report
from guard.correlate.explain import explain
from guard.correlate.window import frame
from guard.service.auth import require
from guard.service.problems import Problem
from guard.service.runtime import Runtime
from guard.service.summary import engines
from guard.wire import RequestRecord

router = APIRouter(prefix="/v1", tags=["requests"])
Reader = Annotated[str, Depends(require("read"))]
_one_at_a_time = asyncio.Lock()


@router.get("/correlation")
async def get_correlation(
    request: Request,
    _: Reader,
    model: str | None = None,
    engine: str | None = None,
    backend: str | None = None,
    class_: Annotated[str | None, Query(alias="class")] = None,
    since_seconds: Annotated[float | None, Query(gt=0, description="only requests that arrived in the last S")] = None,
) -> Response:
    """TTFT and its parts per model, backend, class and road, miss latency against TTFT, and a row per engine."""
    runtime: Runtime = request.app.state.runtime
    now_ns = int(runtime.clock.wall() * 1e9)
    seconds = min(since_seconds or runtime.window.seconds, runtime.window.seconds)
    since_ns = now_ns - int(seconds * 1e9)
    found = list(runtime.window.select(model=model, engine=engine, backend=backend, class_=class_, since_ns=since_ns))
    async with _one_at_a_time:  # a thread, so that polls and spans go on
        answer = await asyncio.to_thread(_report, found, seconds, since_ns, now_ns)
    return JSONResponse(answer)


@router.get("/requests/{any_id:path}")
async def get_request(request: Request, any_id: str, _: Reader) -> Response:
    """A request by its external, internal or trace id; one with n > 1 choices has an entry for each."""
    runtime: Runtime = request.app.state.runtime
    found = runtime.window.find(any_id)
    if not found:
        raise Problem(404, f"no request {any_id[:100]!r} among the last {len(runtime.window)} in memory")
    return JSONResponse({"id": any_id, "requests": [explain(record) for record in found]})


def _report(found: list[RequestRecord], seconds: float, since_ns: int, now_ns: int) -> dict[str, Any]:
    return {**report(frame(found), seconds), "engines": engines(found, since_ns, now_ns)}
