"""Health and metrics."""

import asyncio

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse

from guard.service.auth import require
from guard.service.runtime import TICK_SECONDS, Runtime

router = APIRouter(tags=["health"])

LATE_SECONDS = max(3 * TICK_SECONDS, 5.0)
"""A loop that has not ticked for so long is stuck; a busy one is not."""


@router.get("/livez", response_class=PlainTextResponse)
async def livez(request: Request) -> Response:
    """200 while the process answers and its loop ticks."""
    return _health(request, {"loop": _loop_problem(request)})


@router.get("/readyz", response_class=PlainTextResponse)
async def readyz(request: Request) -> Response:
    """200 when spans and polls are served. A ledger that cannot be written does not make it 503: hooks need us."""
    runtime: Runtime = request.app.state.runtime
    warnings = {"ledger": runtime.journal.problem, "history": runtime.archiving.problem}
    if runtime.probing.targets:
        warnings["probes"] = runtime.probing.problem
    return _health(request, {"loop": _loop_problem(request)}, warnings)


@router.get(
    "/metrics",
    dependencies=[Depends(require("read"))],
    response_class=PlainTextResponse,
    responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus text, or OpenMetrics (which has exemplars) where the client accepts it."""
    runtime: Runtime = request.app.state.runtime
    _, content_type = choose_encoder(request.headers.get("accept", ""))
    openmetrics = content_type.startswith("application/openmetrics-text")
    body = await asyncio.to_thread(runtime.telemetry.render, openmetrics=openmetrics)
    return Response(body, headers={"Content-Type": content_type})


def _loop_problem(request: Request) -> str:
    runtime: Runtime = request.app.state.runtime
    age = runtime.clock.monotonic() - runtime.ticked[0]
    return f"no tick for {age:.1f} s" if age > LATE_SECONDS else ""


def _health(request: Request, checks: dict[str, str], warnings: dict[str, str] | None = None) -> Response:
    failed = any(checks.values())
    lines = []
    if "verbose" in request.query_params or failed:
        lines = [f"[-]{name} failed: {problem}" if problem else f"[+]{name} ok" for name, problem in checks.items()]
        for name, problem in (warnings or {}).items():
            lines.append(f"[!]{name} degraded: {problem}" if problem else f"[+]{name} ok")
    lines.append("failed" if failed else "ok")
    return PlainTextResponse("\n".join(lines) + "\n", 503 if failed else 200)
