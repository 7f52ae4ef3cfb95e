"""The runtime's interface without threads or network, and a request's way through a guarded connector."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from guard import semconv
from guard.hook.connector import guarded
from guard.hook.failsafe import Failsafe
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.table import RequestTable
from guard.hook.worker import Contexts
from guard.wire import Directive, Span
from tests.hook.fakes_vllm import (
    SCHEDULER,
    Clock,
    FakeBlocks,
    FakeConnector,
    FakeRequest,
    output,
    step,
    vllm_config,
)

ENGINE = "h:1/0"
OFF = Directive(id="d1", engine_id=ENGINE, backend="x", mode=semconv.MODE_OFF)

AUTO = replace(OFF, mode=semconv.MODE_AUTO)


class FakeRuntime:
    """The runtime's interface without threads or network."""

    def __init__(self, limit: int = 3) -> None:
        self.clock = Clock()
        self.engine_id = ENGINE
        self.failsafe = Failsafe(limit=limit)
        self.recorder = Recorder()
        self.scope = Scope(self.engine_id, "tiny")
        self.table = RequestTable(self.recorder, self.scope, clock=self.clock, wall=self.clock.wall)
        self.contexts = Contexts()
        self.boot = "boot"
        self.rank = 0
        self.directive: Directive | None = None
        self.joined = 0

    def current(self, backend: str) -> Directive | None:
        return self.directive

    def join(self, backend: Any, *, scheduler: bool) -> int:
        self.joined += 1
        return self.joined

    def leave(self) -> None:
        self.joined -= 1

    def spans(self) -> list[Span]:
        return [span for record in self.recorder.drain(1000) for span in record.spans()]


Make = Callable[..., Any]


def serve(connector: Any, request: FakeRequest, runtime: FakeRuntime) -> Span:
    """One request through the scheduler's calls, as vLLM makes them; returns its request span."""
    request.arrival_time = runtime.clock.wall_seconds()
    connector.on_new_request(request)
    tokens, asynchronous = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1, 2), tokens)
    if tokens and asynchronous:
        connector.build_connector_meta(step())
        runtime.clock.tick(10)
        connector.update_connector_output(output(finished={request.request_id}))
        connector.update_state_after_alloc(request, FakeBlocks(1, 2), 0)
    connector.build_connector_meta(step(request))
    runtime.clock.tick(20)
    request.num_output_tokens = 1
    connector.get_kv_connector_stats()
    return next(span for span in runtime.spans() if span.name == semconv.SPAN_REQUEST)


def decision(span: Span) -> tuple[Any, Any]:
    return span.attributes[semconv.DECISION], span.attributes[semconv.DECISION_REASON]


def new(inner: type = FakeConnector, role: Any = SCHEDULER, **transfer: Any) -> Any:
    return guarded(inner)(vllm_config(**transfer), role, None)


def arrive(process: FakeRuntime, *connectors: Any, **fields: Any) -> FakeRequest:
    request = FakeRequest(**{"arrival_time": process.clock.wall_seconds(), **fields})
    for connector in connectors:
        connector.on_new_request(request)
    return request


METHODS: dict[str, Callable[[Any], object]] = {  # every call of vLLM, on a guarded connector
    "on_new_request": lambda c: c.on_new_request(FakeRequest("z")),
    "get_num_new_matched_tokens": lambda c: c.get_num_new_matched_tokens(FakeRequest("z"), 0),
    "update_state_after_alloc 5": lambda c: c.update_state_after_alloc(FakeRequest("z"), FakeBlocks(1), 5),
    "build_connector_meta": lambda c: c.build_connector_meta(step(FakeRequest("z"))),
    "update_connector_output": lambda c: c.update_connector_output(output(finished={"z"})),
    "get_kv_connector_stats": lambda c: c.get_kv_connector_stats(),
    "request_finished": lambda c: c.request_finished(FakeRequest("z"), []),
    "shutdown": lambda c: c.shutdown(),
}
