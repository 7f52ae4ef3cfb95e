"""`GET /v1/picture`: what the console and `kvguard status` draw."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import JSONResponse, Response

from guard.estimate.shapes import POOL
from guard.service.auth import require
from guard.service.console.headline import REASONS, Row, headline
from guard.service.runtime import Runtime

router = APIRouter(prefix="/v1", tags=["inflection"])
_one_at_a_time = asyncio.Lock()


@router.get("/picture", dependencies=[Depends(require("read"))])
async def get_picture(
    request: Request,
    model: str | None = None,
    backend: str | None = None,
    class_: Annotated[str, Query(alias="class")] = POOL,
) -> Response:
    """TTFT against RTT for one backend and class, remote against recompute: measured points, projected lines, figures.

    Without a choice, the backend with the most requests in the window.
    """
    runtime: Runtime = request.app.state.runtime
    records = list(runtime.window)
    cells = runtime.cells()
    now_ns = int(runtime.clock.wall() * 1e9)
    async with _one_at_a_time:  # a thread, so that polls and spans go on
        answer = await asyncio.to_thread(_drawn, records, cells, now_ns, model=model, backend=backend, class_=class_)
    told = headline([*_rows(runtime)], cells, len(records))
    return JSONResponse({"headline": told._asdict(), "reasons": REASONS, **answer})


def _rows(runtime: Runtime) -> Iterator[Row]:
    for engine in runtime.registry.engines.values():
        silent = runtime.registry.silent(engine)
        for item in runtime.registry.directives(engine):
            yield Row(item.backend, item.mode, item.state, silent, item.reason)


def _drawn(*args: Any, **choice: Any) -> dict[str, Any]:
    from guard.service.console.picture import picture  # numpy takes long to load: here, on the first one's thread

    return picture(*args, **choice)
