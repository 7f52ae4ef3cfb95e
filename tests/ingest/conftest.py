"""Builds OTLP bodies with the public opentelemetry-proto classes, in both encodings."""

import base64
import json

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

NOW_NS = 1_790_000_000 * 10**9


class Body:
    """An export request that is filled span by span; ids count up, so a body is the same every time."""

    def __init__(self, resource=None, scope="kvguard"):
        self.message = ExportTraceServiceRequest()
        self.ids = 0
        self.resource(resource or {"service.name": "vllm"}, scope)

    def resource(self, attributes, scope="kvguard"):
        resource_spans = self.message.resource_spans.add()
        for key, value in attributes.items():
            _set(resource_spans.resource, key, value)
        self.scope = resource_spans.scope_spans.add()
        self.scope.scope.name = scope

    def span(self, name, attributes=None, *, parent=b"", start=NOW_NS, seconds=0.01, kind=3, error=False, **fields):
        self.ids += 1
        span = self.scope.spans.add(
            name=name,
            trace_id=bytes(15) + b"\x01",
            span_id=self.ids.to_bytes(8, "big"),
            parent_span_id=parent,
            start_time_unix_nano=start,
            end_time_unix_nano=start + int(seconds * 1e9),
            kind=kind,
        )
        for key, value in (attributes or {}).items():
            _set(span, key, value)
        if error:
            span.status.code = 2
            span.status.message = "it broke"
        for key, value in fields.items():
            setattr(span, key, value)
        return span

    def protobuf(self):
        return self.message.SerializeToString()

    def tree(self):
        tree = MessageToDict(self.message)
        for resource_spans in tree["resourceSpans"]:
            for scope_spans in resource_spans["scopeSpans"]:
                for span in scope_spans.get("spans", []):
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:
                            span[key] = base64.b64decode(span[key]).hex()
                    span["kind"] = 3
                    if "status" in span:
                        span["status"]["code"] = 2
        return tree

    def json(self):
        return json.dumps(self.tree()).encode()


def _set(owner, key, value):
    pair = owner.attributes.add(key=key)
    if isinstance(value, bool):
        pair.value.bool_value = value
    elif isinstance(value, int):
        pair.value.int_value = value
    elif isinstance(value, float):
        pair.value.double_value = value
    elif isinstance(value, bytes):
        pair.value.bytes_value = value
    elif isinstance(value, list):
        for item in value:
            pair.value.array_value.values.add(string_value=item)
    elif isinstance(value, dict):
        for name, item in value.items():
            pair.value.kvlist_value.values.add(key=name).value.string_value = item
    elif value is not None:
        pair.value.string_value = value


@pytest.fixture
def body():
    return Body()


@pytest.fixture
def now_ns():
    return NOW_NS


@pytest.fixture(scope="session")
def new_body():
    """The class itself, for property tests that need a fresh body per example."""
    return Body
