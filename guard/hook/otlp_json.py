"""Encodes spans as OTLP/JSON text, cheap enough for a thread that shares the GIL with vLLM's engine.

OTLP/JSON (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): ids as hex, 64-bit integers as text.
JSON has no NaN and no infinity, OTLP no None: such an attribute is left out, the rest of its span goes.
"""

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Final

from guard import __version__, semconv
from guard.wire import Span

TEXT_LIMIT: Final = 1024
"""Longest text of an attribute, in characters; what is longer is cut."""

TAIL: Final = "]}]}]}"
"""What stands after the spans."""

_INT64: Final = 1 << 63
_KEY_CACHE_LIMIT: Final = 512
_keys: dict[str, str] = {}


def encode_span(span: Span) -> str:
    """One span as an OTLP/JSON object."""
    parent = f',"parentSpanId":{_text(span.parent_id)}' if span.parent_id else ""
    status = ',"status":{"code":2}' if span.error else ""
    return (
        f'{{"traceId":{_text(span.trace_id)},"spanId":{_text(span.span_id)}{parent},"name":{_text(span.name)},'
        f'"kind":{span.kind},"startTimeUnixNano":"{max(0, span.start_ns)}","endTimeUnixNano":"{max(0, span.end_ns)}",'
        f'"attributes":[{_attributes(span.attributes)}]{status}}}'
    )


def head(resource: Mapping[str, object]) -> str:
    """What stands before the comma-separated spans in the body of an OTLP export request: one resource, our scope."""
    return (
        f'{{"resourceSpans":[{{"resource":{{"attributes":[{_attributes(resource)}]}},"scopeSpans":[{{"scope":'
        f'{{"name":"{semconv.SCOPE}","version":"{__version__}"}},"spans":['
    )


def _attributes(attributes: Mapping[str, object]) -> str:
    # One flat loop on exact types, the common ones first: it is most of the cost of an export.
    found: list[str] = []
    for key, value in attributes.items():
        kind = type(value)
        if kind is float:
            text = _double(value)  # type: ignore[arg-type]
        elif kind is str:
            text = '"stringValue":' + _text(value)  # type: ignore[arg-type]
        elif kind is int:
            text = _integer(value)  # type: ignore[arg-type]
        else:
            text = _rare(value)
        if text:
            found.append((_keys.get(key) or _key(key)) + text + "}}")
    return ",".join(found)


def _double(value: float) -> str:
    # x - x is 0 for every number but NaN for NaN and the infinities.
    return f'"doubleValue":{value!r}' if value - value == 0.0 else ""


def _integer(value: int) -> str:
    return f'"intValue":"{value}"' if -_INT64 <= value < _INT64 else ""


def _rare(value: object) -> str:
    if isinstance(value, bool):
        return '"boolValue":true' if value else '"boolValue":false'
    if isinstance(value, str):
        return '"stringValue":' + _text(str(value))
    if isinstance(value, int):
        return _integer(int(value))
    return _double(float(value)) if isinstance(value, float) else ""


def _key(key: str) -> str:
    start = f'{{"key":{_text(key)},"value":{{'
    if len(_keys) < _KEY_CACHE_LIMIT:
        _keys[key] = start
    return start


def _text(value: str) -> str:
    if not value.isascii():  # a lone surrogate is legal here but makes the receiver refuse the whole request
        value = value.encode("utf-8", "replace").decode()
    return encode_basestring_ascii(value if len(value) <= TEXT_LIMIT else value[:TEXT_LIMIT])
