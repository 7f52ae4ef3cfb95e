"""Spans and records for tests of the exporter, and what it sent as spans again."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from guard import semconv
from guard.hook.config import HookConfig
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
from guard.wire import Span
from tests.hook.fake_transport import FakeTransport

RESOURCE = {"service.name": "vllm", "process.pid": 7}


def make_span(number: int, **attributes: Any) -> Span:
    return Span(
        name=semconv.SPAN_REQUEST if number % 2 else semconv.SPAN_FETCH,
        trace_id=f"{number + 1:032x}",
        span_id=f"{number + 1:016x}",
        parent_id="" if number % 2 else f"{number + 2:016x}",
        start_ns=1_700_000_000_000_000_000 + number,
        end_ns=1_700_000_000_000_000_000 + 2 * number,
        attributes=attributes
        or {"kvguard.ttft": number / 7, "kvguard.tokens": number, "gen_ai.request.id": f"r{number}"},
        kind=1 if number % 2 else 3,
        error=number % 3 == 0,
    )


@dataclass
class FakeRecord:
    found: list[Span]

    def spans(self) -> Iterable[Span]:
        return iter(self.found)


class BrokenRecord:
    def spans(self) -> Iterable[Span]:
        yield make_span(1)
        raise KeyError("a bug")


def fill(recorder: Recorder, count: int) -> list[Span]:
    spans = [make_span(number) for number in range(count)]
    for span in spans:
        recorder.append(FakeRecord([span]))
    return spans


def decode(body: bytes) -> tuple[dict[str, Any], list[Span]]:
    (resource,) = json.loads(body)["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    spans = [
        Span(
            name=item["name"],
            trace_id=item["traceId"],
            span_id=item["spanId"],
            parent_id=item.get("parentSpanId", ""),
            start_ns=int(item["startTimeUnixNano"]),
            end_ns=int(item["endTimeUnixNano"]),
            attributes=values(item["attributes"]),
            kind=item["kind"],
            error=item.get("status", {}).get("code") == 2,
        )
        for item in scope["spans"]
    ]
    return values(resource["resource"]["attributes"]), spans


def values(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        item["key"]: int(value) if kind == "intValue" else value
        for item in items
        for kind, value in item["value"].items()
    }


def make(service_url: str, recorder: Recorder, **more: Any) -> Exporter:
    return Exporter(HookConfig(endpoints=(service_url,)), recorder, RESOURCE, pause=lambda _: None, **more)


def fake(recorder: Recorder, transport: FakeTransport, clock: Any, **more: Any) -> Exporter:
    return make("http://unused", recorder, transport=transport, clock=clock, **more)
