"""Reads encoded spans and resources of any form through the classes that OpenTelemetry's protocol generates."""

from collections.abc import Iterable
from itertools import islice

from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from guard.ingest import fields
from guard.ingest.batch import Batch
from guard.ingest.fields import KINDS, MAX_FREE_ATTRIBUTES, MAX_TEXT, check
from guard.wire import AttributeValue, Span

Attributes = dict[str, AttributeValue]


def read_span(raw: bytes, spans: list[Span], batch: Batch, earliest_ns: int, latest_ns: int) -> None:
    """Reads an encoded span of any form; rejects it, with the reason, where it is broken."""
    try:
        span = ProtoSpan.FromString(raw)
    except DecodeError:
        batch.reject("", "cannot be decoded")
        return
    name = span.name
    ours = name in fields.OURS
    if not ours and not fields.from_server(name):
        if name:
            batch.ignored += 1
        else:
            batch.reject("", "has no name")
        return
    trace_id, span_id, parent_id = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    attributes: Attributes = {}
    problem = (
        fields.ids_problem(trace_id, span_id, parent_id)
        or fields.times_problem(start_ns, end_ns, earliest_ns, latest_ns)
        or (_read_known(span.attributes, attributes) if ours else _read_free(span.attributes, attributes))
        or fields.missing_problem(name, attributes)
    )
    if problem:
        batch.reject(name, problem)
        return
    error = span.status.code == Status.STATUS_CODE_ERROR
    spans.append(Span(name, trace_id, span_id, parent_id, start_ns, end_ns, attributes, span.kind, error))


def read_resource(encoded: bytes) -> Attributes:
    """A resource's scalars.

    Raises:
        DecodeError: it cannot be decoded.
    """
    pairs = Resource.FromString(encoded).attributes
    return fields.resource_of((pair.key, _scalar(pair.value)) for pair in pairs)


def _read_known(pairs: Iterable[KeyValue], attributes: Attributes) -> str:
    """Reads the attributes in `fields.KINDS`; returns what is wrong with them, if anything."""
    for pair in pairs:
        kind = KINDS.get(pair.key)
        if kind is not None:
            value, problem = check(pair.key, kind, _scalar(pair.value))
            if value is None:
                return problem
            attributes[pair.key] = value
    return ""


def _read_free(pairs: Iterable[KeyValue], attributes: Attributes) -> str:
    """Reads every scalar of a span that is only shown to people."""
    for pair in islice(pairs, MAX_FREE_ATTRIBUTES):
        value = _scalar(pair.value)
        if value is not None and value == value and len(pair.key) <= MAX_TEXT:
            attributes[pair.key] = value[:MAX_TEXT] if isinstance(value, str) else value
    return ""


def _scalar(value: AnyValue) -> AttributeValue | None:
    """The scalar; None where it is empty, an array, a map or bytes."""
    kind = value.WhichOneof("value")
    if kind in ("string_value", "int_value", "double_value", "bool_value"):
        scalar: AttributeValue = getattr(value, kind)
        return scalar
    return None
