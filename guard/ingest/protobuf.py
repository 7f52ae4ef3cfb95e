"""Decodes OTLP traces from protobuf.

The message is parsed by upb through a view of our own: the wire format of `ExportTraceServiceRequest` with only the
fields that are read, and attributes left as bytes. Making Python objects of every attribute through the generated
classes costs more than all the rest of the service; here known keys are found by their encoded prefix, and encoded
pairs that repeat (names, flags) are remembered whole. Whatever does not have the plain form goes through the
generated `KeyValue` class.
"""

from collections.abc import Iterable
from itertools import islice
from struct import Struct
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from guard import semconv
from guard.errors import WireError
from guard.ingest import fields
from guard.ingest.batch import Batch
from guard.ingest.fields import KINDS, MAX_FREE_ATTRIBUTES, MAX_SECONDS, MAX_TEXT, SECONDS, check
from guard.wire import AttributeValue, Span

_FIELD = descriptor_pb2.FieldDescriptorProto
_VIEW: Final = {
    "Traces": [("resource_spans", 1, _FIELD.TYPE_MESSAGE, True, "ResourceSpans")],
    "ResourceSpans": [
        ("resource", 1, _FIELD.TYPE_BYTES, False, ""),
        ("scope_spans", 2, _FIELD.TYPE_MESSAGE, True, "ScopeSpans"),
    ],
    "ScopeSpans": [("spans", 2, _FIELD.TYPE_MESSAGE, True, "Span")],
    "Span": [
        ("trace_id", 1, _FIELD.TYPE_BYTES, False, ""),
        ("span_id", 2, _FIELD.TYPE_BYTES, False, ""),
        ("parent_span_id", 4, _FIELD.TYPE_BYTES, False, ""),
        ("name", 5, _FIELD.TYPE_BYTES, False, ""),
        ("kind", 6, _FIELD.TYPE_INT32, False, ""),
        ("start_time_unix_nano", 7, _FIELD.TYPE_FIXED64, False, ""),
        ("end_time_unix_nano", 8, _FIELD.TYPE_FIXED64, False, ""),
        ("attributes", 9, _FIELD.TYPE_BYTES, True, ""),
        ("status", 15, _FIELD.TYPE_BYTES, False, ""),
    ],
}


def _view() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="kvguard/view.proto", package="kvguard.view", syntax="proto3")
    for message, columns in _VIEW.items():
        made = file.message_type.add(name=message)
        for name, number, kind, repeated, of in columns:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            made.field.add(
                name=name, number=number, type=kind, label=label, type_name=f".kvguard.view.{of}" if of else None
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("kvguard.view.Traces"))


_TRACES: Final = _view()
_NAMES: Final = {name.encode(): name for name in fields.OURS}
_MP: Final = semconv.LMCACHE_SPAN_PREFIX.encode()
_PREFIXES: Final = {
    bytes((0x0A, len(key))) + key.encode(): (key, kind, key in fields.REPEATING) for key, kind in fields.KINDS.items()
}
_SECONDS: Final = {
    bytes((0x0A, len(key))) + key.encode() + b"\x12\x09\x21": key
    for key, kind in fields.KINDS.items()
    if kind == SECONDS
}
_double: Final = Struct("<d").unpack_from
_ERROR_STATUS: Final = b"\x18\x02"
_MAX_REMEMBERED: Final = 32768
_MAX_RESOURCES: Final = 256
_remembered: dict[bytes, tuple[str, AttributeValue]] = {}
_resources: dict[bytes, dict[str, AttributeValue]] = {}


def decode(body: bytes, batch: Batch, earliest_ns: int, latest_ns: int) -> None:
    """Reads an `ExportTraceServiceRequest` into the batch.

    Raises:
        WireError: the body is not one.
    """
    try:
        traces = _TRACES.FromString(body)
    except DecodeError as error:
        raise WireError(f"body is not an OTLP trace request in protobuf: {error}") from None
    for resource_spans in traces.resource_spans:
        spans: list[Span] = []
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                batch.received += 1
                name = _NAMES.get(span.name)
                if name is not None:
                    _take(span, name, spans, batch, earliest_ns, latest_ns)
                elif span.name.startswith(_MP):
                    _take(span, span.name.decode(errors="replace"), spans, batch, earliest_ns, latest_ns)
                elif span.name:
                    batch.ignored += 1
                else:
                    batch.reject("", "has no name")
        if spans:
            batch.groups.append((_resource(resource_spans.resource), spans))


def _take(view: Any, name: str, spans: list[Span], batch: Batch, earliest_ns: int, latest_ns: int) -> None:
    trace_id, span_id, parent_id = view.trace_id.hex(), view.span_id.hex(), view.parent_span_id.hex()
    start_ns, end_ns = view.start_time_unix_nano, view.end_time_unix_nano
    problem = fields.ids_problem(trace_id, span_id, parent_id)
    if not problem and not earliest_ns <= start_ns <= end_ns <= latest_ns:
        problem = fields.times_problem(start_ns, end_ns, earliest_ns, latest_ns)
    attributes: dict[str, AttributeValue] = {}
    if not problem:
        read = _read_known if name in fields.OURS else _read_free
        problem = read(view.attributes, attributes)
    if not problem and name in fields.REQUIRED:
        problem = fields.missing_problem(name, attributes)
    if problem:
        batch.reject(name, problem)
        return
    status = view.status
    error = bool(status) and (status == _ERROR_STATUS or _is_error(status))
    spans.append(Span(name, trace_id, span_id, parent_id, start_ns, end_ns, attributes, view.kind, error))


def _read_known(pairs: Any, attributes: dict[str, AttributeValue]) -> str:
    """Reads the pairs whose keys are in `fields.KINDS`; returns what is wrong with them, if anything.

    Two forms are read at once: pairs seen before, and `key, number of seconds` (the last eight bytes are the double).
    """
    recall, seconds = _remembered.get, _SECONDS.get
    for pair in pairs[:]:
        seen = recall(pair)
        if seen is not None:
            attributes[seen[0]] = seen[1]
            continue
        key = seconds(pair[:-8])
        if key is not None:
            number = _double(pair, len(pair) - 8)[0]
            if 0.0 <= number <= MAX_SECONDS:
                attributes[key] = number
                continue
        found = _PREFIXES.get(pair[: pair[1] + 2] if len(pair) > 1 else pair) or _unusual(pair)
        if found is None:
            continue
        key, kind, repeats = found
        value, problem = check(key, kind, _value(pair, len(key) + 2))
        if value is None:
            return problem
        attributes[key] = value
        if repeats:
            if len(_remembered) >= _MAX_REMEMBERED:
                _remembered.clear()
            _remembered[pair] = (key, value)
    return ""


def _unusual(pair: bytes) -> tuple[str, int, bool] | None:
    """What `_PREFIXES` holds of a pair whose key does not come first; None where the key is none of ours."""
    if pair[:1] == b"\x0a":
        return None
    try:
        key = KeyValue.FromString(pair).key
    except DecodeError:
        return None
    kind = KINDS.get(key)
    return None if kind is None else (key, kind, False)


def _value(pair: bytes, mark: int) -> AttributeValue | None:
    """The scalar of an encoded pair whose key ends at `mark`; None where it is broken, empty or no scalar."""
    size = len(pair)
    if mark + 5 < size and pair[mark] == 0x12 and pair[mark + 2] == 0x0A and mark + 4 + pair[mark + 3] == size:
        return pair[mark + 4 :].decode(errors="replace")  # a text of less than 126 bytes
    try:
        return _scalar(KeyValue.FromString(pair).value)
    except DecodeError:
        return None


def _scalar(value: AnyValue) -> AttributeValue | None:
    kind = value.WhichOneof("value")
    if kind in ("string_value", "int_value", "double_value", "bool_value"):
        scalar: AttributeValue = getattr(value, kind)
        return scalar
    return None


def _read_free(pairs: Iterable[bytes], attributes: dict[str, AttributeValue]) -> str:
    """Reads every scalar of a span that is only shown to people."""
    try:
        for pair in islice(pairs, MAX_FREE_ATTRIBUTES):
            decoded = KeyValue.FromString(pair)
            value = _scalar(decoded.value)
            if value is not None and value == value:
                attributes[decoded.key] = value[:MAX_TEXT] if isinstance(value, str) else value
    except DecodeError:
        return "has broken attributes"
    return ""


def _is_error(status: bytes) -> bool:
    try:
        return int(Status.FromString(status).code) == Status.STATUS_CODE_ERROR
    except DecodeError:
        return False


def _resource(encoded: bytes) -> dict[str, AttributeValue]:
    known = _resources.get(encoded)
    if known is None:
        try:
            pairs = Resource.FromString(encoded).attributes
        except DecodeError:
            raise WireError("body has a broken resource") from None
        known = {pair.key: value for pair in pairs if (value := _scalar(pair.value)) is not None}
        if len(_resources) >= _MAX_RESOURCES:
            _resources.clear()
        _resources[encoded] = known
    return dict(known)
