"""Puts the HTTP service together: routes, errors, limits, and the tasks that live as long as it does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from fastapi import FastAPI

from guard import __version__, semconv
from guard.service import openapi, problems
from guard.service.auth import Tokens
from guard.service.browsers import BrowserDefence
from guard.service.console import pages
from guard.service.forward import Forwarder, read_headers
from guard.service.limits import BodyLimit
from guard.service.routes import health, inflection, objectives, offload, picture, probes, requests
from guard.service.routes.directives import delete_directives, get_directives
from guard.service.routes.events import get_events
from guard.service.routes.traces import Budget, post_traces
from guard.service.runtime import Runtime

FORWARD_TIMEOUT: Final = 10.0


def create_app(runtime: Runtime, tokens: Tokens) -> FastAPI:
    """The ASGI application over `runtime`, which it runs and closes."""
    app = FastAPI(
        title="kvguard", version=__version__, lifespan=_lifespan, redoc_url=None, docs_url=None,
        description="Sees, explains and guards remote KV-cache offloading in vLLM.",
    )  # fmt: skip
    app.state.runtime = runtime
    app.state.tokens = tokens
    app.state.budget = Budget(runtime.settings.max_inflight_bytes)
    # Plain Starlette routes: thousands of hooks poll, and a framework route costs three times as much.
    app.add_route("/v1/traces", post_traces, methods=["POST"])
    app.add_route("/v1/directives/{engine_id:path}", get_directives, methods=["GET"])
    app.add_route("/v1/directives/{engine_id:path}", delete_directives, methods=["DELETE"])
    app.add_route("/v1/events", get_events, methods=["GET"])
    for router in (
        offload.router, objectives.router, requests.router, inflection.router, probes.router, health.router,
        picture.router, pages.router,
    ):  # fmt: skip
        app.include_router(router)
    problems.install(app)
    settings = runtime.settings
    app.add_middleware(BodyLimit, traces_bytes=settings.max_body_bytes, seconds=settings.body_timeout_seconds)
    app.add_middleware(BrowserDefence)
    openapi.document(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    settings = runtime.settings
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runtime.close)
        tasks = [
            asyncio.create_task(runtime.run(), name="tick"),
            asyncio.create_task(runtime.estimating.run(), name="estimate"),
            asyncio.create_task(runtime.probing.run(), name="probe"),
        ]
        if settings.forward_endpoint:
            import httpx2  # takes long to load, and most services forward nothing

            client = await stack.enter_async_context(httpx2.AsyncClient(timeout=FORWARD_TIMEOUT))
            runtime.forwarder = Forwarder(
                client,
                settings.forward_endpoint,
                count=lambda outcome, spans: runtime.telemetry.count(semconv.FORWARD_SPANS, outcome, by=spans),
                headers=read_headers(settings.forward_headers_file) if settings.forward_headers_file else None,
                ratio=settings.forward_ratio,
                queue_bytes=settings.forward_queue_bytes,
            )
            tasks.append(asyncio.create_task(runtime.forwarder.run(), name="forward"))
        try:
            yield
        finally:
            runtime.end_waits()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
