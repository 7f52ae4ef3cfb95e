"""`/v1/correlation`: where TTFT goes; `/v1/requests`: a list, and one request explained. From the window in memory."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from guard.correlate.explain import explain
from guard.estimate.road import other_road
from guard.estimate.shapes import POOL, Cell
from guard.semconv import OUTCOME_FAILED
from guard.service import listing, shapes
from guard.service.auth import require
from guard.service.problems import Problem
from guard.service.runtime import Runtime
from guard.wire import RequestRecord

router = APIRouter(prefix="/v1", tags=["requests"])
Reader = Annotated[str, Depends(require("read"))]
Since = Annotated[
    float | None, Query(gt=0, le=366 * 86_400, description="only requests that arrived in the last S seconds")
]
_one_at_a_time = asyncio.Lock()


@router.get("/correlation")
async def get_correlation(
    request: Request,
    _: Reader,
    model: str | None = None,
    engine: str | None = None,
    backend: str | None = None,
    class_: Annotated[str | None, Query(alias="class")] = None,
    since_seconds: Since = None,
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


@router.get("/requests", response_model=shapes.RequestsOut)
async def get_requests(
    request: Request,
    _: Reader,
    sort: listing.Order = "latest",
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Annotated[str, Query(max_length=256, description="next_cursor of the page before")] = "",
    model: str | None = None,
    engine: str | None = None,
    backend: str | None = None,
    class_: Annotated[str | None, Query(alias="class")] = None,
    decision: Literal["remote", "decline", "skip", "other-tier", "none"] | None = None,
    aborted: bool | None = None,
    failed: Annotated[bool | None, Query(description="whether a fetch of it failed")] = None,
    min_ttft_seconds: Annotated[float | None, Query(ge=0)] = None,
    since_seconds: Since = None,
) -> Response:
    """The requests in memory, newest or slowest first."""
    runtime: Runtime = request.app.state.runtime
    since_ns = None if since_seconds is None else int((runtime.clock.wall() - since_seconds) * 1e9)
    held = list(runtime.window)  # the thread must not walk what the loop changes

    def wanted(record: RequestRecord) -> bool:
        return (
            model in (None, record.model)
            and engine in (None, record.engine_id)
            and backend in (None, record.backend)
            and class_ in (None, record.class_)
            and decision in (None, record.decision)
            and aborted in (None, record.aborted)
            and (failed is None or failed == any(fetch.outcome == OUTCOME_FAILED for fetch in record.fetches))
            and (min_ttft_seconds is None or (record.ttft is not None and record.ttft >= min_ttft_seconds))
            and (since_ns is None or record.arrival_ns >= since_ns)
        )

    def found() -> dict[str, Any]:
        rows, following = listing.page(filter(wanted, held), sort, limit, cursor)
        return {"requests": [listing.row(record) for record in rows], "next_cursor": following or None}

    async with _one_at_a_time:
        try:
            return JSONResponse(await asyncio.to_thread(found))
        except ValueError as error:
            raise Problem(400, str(error), kind="bad-cursor") from None


@router.get("/requests/{any_id:path}")
async def get_request(request: Request, any_id: str, _: Reader) -> Response:
    """A request by its external, internal or trace id; one with n > 1 choices has an entry for each."""
    runtime: Runtime = request.app.state.runtime
    found = runtime.window.find(any_id)
    if not found:
        raise Problem(404, f"no request {any_id[:100]!r} among the last {len(runtime.window)} in memory")
    cells = {(cell.model, cell.backend, cell.class_): cell for cell in runtime.cells()}
    return JSONResponse({"id": any_id, "requests": [_explained(record, cells) for record in found]})


def _explained(record: RequestRecord, cells: Mapping[tuple[str, str, str], Cell]) -> dict[str, Any]:
    """The request's own account, and what the road not taken is projected to have cost."""
    key = (record.model, record.backend)
    other = other_road(record, cells.get((*key, record.class_)) or cells.get((*key, POOL)))
    told = explain(record)
    difference = other["difference_seconds"]
    if difference is not None:
        what = "less" if difference < 0.0 else "more"
        told["words"].append(
            f"{other['choice']} would have taken {abs(difference) * 1e3:.3g} ms {what}"
            f" (projected from {other['ttft_seconds']['n']} requests)"
        )
    return {**told, "other_road": other}


def _report(found: list[RequestRecord], seconds: float, since_ns: int, now_ns: int) -> dict[str, Any]:
    # numpy and polars take long to load: here, on the thread of the first who asks
    from guard.correlate.attribution import report
    from guard.correlate.frame import frame
    from guard.service.summary import engines

    return {**report(frame(found), seconds), "engines": engines(found, since_ns, now_ns)}
