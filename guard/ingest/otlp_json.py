"""Decodes OTLP traces from JSON with msgspec structs.

As OTLP/JSON says: ids are hex, 64-bit integers are texts or numbers, unknown keys are ignored. A body whose spans are
not all of the right types is read a second time, span by span, so that one broken span costs only itself.
"""

from typing import Any, Final

import msgspec

from guard.errors import WireError
from guard.ingest import fields
from guard.ingest.batch import Batch
from guard.ingest.fields import (
    COUNT,
    KINDS,
    MAX_COUNT,
    MAX_FREE_ATTRIBUTES,
    MAX_SECONDS,
    MAX_TEXT,
    SECONDS,
    TEXT,
    check,
)
from guard.ingest.memory import Memory
from guard.wire import AttributeValue, Span

Attributes = dict[str, AttributeValue]

_tails: Memory[Attributes] = Memory(8192)  # by encoded attributes, of spans that repeat


class _Value(msgspec.Struct, gc=False, rename="camel"):
    string_value: str | None = None
    int_value: int | None = None
    double_value: float | None = None
    bool_value: bool | None = None


class _Pair(msgspec.Struct, gc=False):
    key: str = ""
    value: _Value | None = None


class _Status(msgspec.Struct, gc=False):
    code: int = 0


_NOTHING: Final = msgspec.Raw(b"[]")


class _Span(msgspec.Struct, gc=False, rename="camel"):
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str | None = ""
    name: str = ""
    kind: int = 0
    start_time_unix_nano: int = 0
    end_time_unix_nano: int = 0
    attributes: msgspec.Raw = _NOTHING  # of most spans not read, or known by its text
    status: _Status | None = None


class _Scope(msgspec.Struct, gc=False):
    spans: list[_Span] | None = None


class _RawScope(msgspec.Struct, gc=False):
    spans: list[msgspec.Raw] | None = None


class _Resource(msgspec.Struct, gc=False):
    attributes: list[_Pair] | None = None


class _ResourceSpans(msgspec.Struct, gc=False, rename="camel"):
    resource: _Resource | None = None
    scope_spans: list[_Scope] | None = None


class _RawResourceSpans(msgspec.Struct, gc=False, rename="camel"):
    resource: _Resource | None = None
    scope_spans: list[_RawScope] | None = None


class _Traces(msgspec.Struct, gc=False, rename="camel"):
    resource_spans: list[_ResourceSpans] | None = None


class _RawTraces(msgspec.Struct, gc=False, rename="camel"):
    resource_spans: list[_RawResourceSpans] | None = None


_decode: Final = msgspec.json.Decoder(_Traces, strict=False).decode
_decode_raw: Final = msgspec.json.Decoder(_RawTraces, strict=False).decode
_decode_pairs: Final = msgspec.json.Decoder(list[_Pair] | None, strict=False).decode
_decode_span: Final = msgspec.json.Decoder(_Span, strict=False).decode


def decode(body: bytes, batch: Batch, earliest_ns: int, latest_ns: int) -> None:
    """Reads an `ExportTraceServiceRequest` in JSON into the batch.

    Raises:
        WireError: the body is not one.
    """
    try:
        traces: Any = _decode(body)
    except msgspec.ValidationError:
        traces = _decode_one_by_one(body, batch)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"body is not an OTLP trace request in JSON: {error}") from None
    for resource_spans in traces.resource_spans or ():
        spans: list[Span] = []
        for scope in resource_spans.scope_spans or ():
            for span in scope.spans or ():
                batch.received += 1
                name = span.name
                if name in fields.OURS or fields.from_server(name):
                    _take(span, spans, batch, earliest_ns, latest_ns)
                elif name:
                    batch.ignored += 1
                else:
                    batch.reject("", "has no name")
        batch.take(_resource(resource_spans.resource), spans)


def _decode_one_by_one(body: bytes, batch: Batch) -> _Traces:
    try:
        raw = _decode_raw(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"body is not an OTLP trace request in JSON: {error}") from None
    good: list[_ResourceSpans] = []
    for resource_spans in raw.resource_spans or ():
        spans: list[_Span] = []
        for scope in resource_spans.scope_spans or ():
            for item in scope.spans or ():
                try:
                    spans.append(_decode_span(item))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    batch.received += 1
                    batch.reject("", str(error)[:120])
        good.append(_ResourceSpans(resource_spans.resource, [_Scope(spans)]))
    return _Traces(good)


def _take(span: _Span, spans: list[Span], batch: Batch, earliest_ns: int, latest_ns: int) -> None:
    name, start_ns, end_ns = span.name, span.start_time_unix_nano, span.end_time_unix_nano
    trace_id, span_id, parent_id = span.trace_id.lower(), span.span_id.lower(), (span.parent_span_id or "").lower()
    problem = fields.ids_problem(trace_id, span_id, parent_id)
    if not problem:
        try:
            if len(bytes.fromhex(trace_id + span_id + parent_id)) * 2 != 48 + len(parent_id):
                problem = "has ids that are not hex"
        except ValueError:
            problem = "has ids that are not hex"
    if not problem and not earliest_ns <= start_ns <= end_ns <= latest_ns:
        problem = fields.times_problem(start_ns, end_ns, earliest_ns, latest_ns)
    attributes: Attributes = {}
    if not problem:
        attributes, problem = _attributes(name, span.attributes)
    if not problem and name in fields.REQUIRED:
        problem = fields.missing_problem(name, attributes)
    if problem:
        batch.reject(name, problem)
        return
    error = span.status is not None and span.status.code == 2
    spans.append(Span(name, trace_id, span_id, parent_id, start_ns, end_ns, attributes, span.kind, error))


def _attributes(name: str, raw: msgspec.Raw) -> tuple[Attributes, str]:
    """A span's attributes, and what is wrong with them, if anything."""
    repeats = name in fields.REPEATING_SPANS
    encoded = bytes(raw) if repeats else b""
    if repeats and (known := _tails.get(encoded)) is not None:
        return known, ""
    try:
        pairs = _decode_pairs(raw) or []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {}, str(error)[:120]
    attributes: Attributes = {}
    problem = _read_known(pairs, attributes) if name in fields.OURS else _read_free(pairs, attributes)
    if repeats and not problem:
        _tails.keep(encoded, attributes)
    return attributes, problem


def _scalar(value: _Value | None) -> AttributeValue | None:
    if value is None:
        return None
    if value.string_value is not None:
        return value.string_value
    if value.int_value is not None:
        return value.int_value
    return value.bool_value if value.double_value is None else value.double_value


def _read_known(pairs: list[_Pair], attributes: Attributes) -> str:
    kind_of = KINDS.get
    for pair in pairs:
        key = pair.key
        kind = kind_of(key)
        if kind is None:
            continue
        scalar = pair.value
        value: AttributeValue | None
        if scalar is None:
            value = None
        elif kind == SECONDS and scalar.double_value is not None:
            value = scalar.double_value
            if 0.0 <= value <= MAX_SECONDS:
                attributes[key] = value
                continue
        elif kind == COUNT and scalar.int_value is not None:
            value = scalar.int_value
            if 0 <= value <= MAX_COUNT:
                attributes[key] = value
                continue
        elif kind == TEXT and scalar.string_value is not None:
            value = scalar.string_value
            if len(value) <= MAX_TEXT:
                attributes[key] = value
                continue
        else:
            value = _scalar(scalar)
        value, problem = check(key, kind, value)
        if value is None:
            return problem
        attributes[key] = value
    return ""


def _read_free(pairs: list[_Pair], attributes: Attributes) -> str:
    for pair in pairs[:MAX_FREE_ATTRIBUTES]:
        value = _scalar(pair.value)
        if value is not None and value == value and len(pair.key) <= MAX_TEXT:
            attributes[pair.key] = value[:MAX_TEXT] if isinstance(value, str) else value
    return ""


def _resource(resource: _Resource | None) -> Attributes:
    pairs = resource.attributes or [] if resource is not None else []
    return fields.resource_of((pair.key, _scalar(pair.value)) for pair in pairs)
