import json
import math

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard import __version__
from guard.hook.otlp_json import TAIL, TEXT_LIMIT, encode_span, head
from guard.wire import Span


def span(**attributes: object) -> Span:
    return Span(
        name="kvguard.kv.fetch",
        trace_id="0af7651916cd43dd8448eb211c80319c",
        span_id="b7ad6b7169203331",
        parent_id="00f067aa0ba902b7",
        start_ns=1_700_000_000_000_000_000,
        end_ns=1_700_000_000_012_345_678,
        attributes=attributes,  # type: ignore[arg-type]
        kind=3,
    )


def attributes_of(encoded: str) -> dict[str, object]:
    return {item["key"]: item["value"] for item in json.loads(encoded)["attributes"]}


def test_span_is_the_object_that_the_specification_shows():
    assert json.loads(encode_span(span(**{"kvguard.blocks": 16}))) == {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": "b7ad6b7169203331",
        "parentSpanId": "00f067aa0ba902b7",
        "name": "kvguard.kv.fetch",
        "kind": 3,
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000000012345678",
        "attributes": [{"key": "kvguard.blocks", "value": {"intValue": "16"}}],
    }


def test_root_has_no_parent_and_an_error_has_its_status():
    root = span()
    root.parent_id = ""
    root.error = True
    found = json.loads(encode_span(root))
    assert "parentSpanId" not in found
    assert found["status"] == {"code": 2}


def test_value_types():
    assert attributes_of(encode_span(span(t="x", b=True, f=False, i=-7, d=0.1))) == {
        "t": {"stringValue": "x"},
        "b": {"boolValue": True},
        "f": {"boolValue": False},
        "i": {"intValue": "-7"},
        "d": {"doubleValue": 0.1},
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 1 << 63, -(1 << 63) - 1, [1], b"x", object()])
def test_a_value_without_a_form_costs_its_attribute_only(value: object):
    assert attributes_of(encode_span(span(bad=value, good=1))) == {"good": {"intValue": "1"}}


@pytest.mark.parametrize("value", [1e308, 5e-324, 1e-7, -0.0, 123456789.123456789])
def test_floats_come_back_as_they_were(value: float):
    assert attributes_of(encode_span(span(x=value)))["x"] == {"doubleValue": value}


def test_subclasses_of_numbers_are_written_as_their_value():
    class Odd(float):
        def __repr__(self) -> str:
            return "Odd!"

    class Flag(int):
        def __repr__(self) -> str:
            return "Flag!"

    assert attributes_of(encode_span(span(o=Odd(0.5), f=Flag(3)))) == {
        "o": {"doubleValue": 0.5},
        "f": {"intValue": "3"},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"\\\n\0', '"\\\n\0'),
        ("\u00e9\u4e2d\U0001f600", "\u00e9\u4e2d\U0001f600"),
        ("a\ud800b", "a?b"),
        ("x" * (TEXT_LIMIT + 1), "x" * TEXT_LIMIT),
    ],
)
def test_texts_are_safe(text: str, expected: str):
    encoded = encode_span(span(t=text))
    assert encoded.isascii()
    assert attributes_of(encoded)["t"] == {"stringValue": expected}


def test_negative_times_become_zero():
    broken = span()
    broken.start_ns = -5
    assert json.loads(encode_span(broken))["startTimeUnixNano"] == "0"


def test_protobuf_reads_the_whole_request():
    body = head({"service.name": "vllm", "process.pid": 7}) + ",".join([encode_span(span(x=1.5)), encode_span(span())])
    message = json_format.Parse(body + TAIL, ExportTraceServiceRequest())
    (resource,) = message.resource_spans
    assert [(item.key, item.value.string_value, item.value.int_value) for item in resource.resource.attributes] == [
        ("service.name", "vllm", 0),
        ("process.pid", "", 7),
    ]
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("kvguard", __version__)
    assert [found.name for found in scope.spans] == ["kvguard.kv.fetch"] * 2
    assert scope.spans[0].attributes[0].value.double_value == 1.5
    assert scope.spans[0].end_time_unix_nano - scope.spans[0].start_time_unix_nano == 12_345_678


def test_a_request_without_spans_is_valid():
    message = json_format.Parse(head({}) + TAIL, ExportTraceServiceRequest())
    assert len(message.resource_spans[0].scope_spans[0].spans) == 0
