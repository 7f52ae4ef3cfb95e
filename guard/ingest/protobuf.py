"""Decodes OTLP traces from protobuf.

upb (the C core of protobuf) takes the request apart down to the encoded spans. Those are read here by hand where they
have the form that every OpenTelemetry encoder gives them (fields in the order of their numbers, short lengths), which
is three times as fast as making Python objects of every attribute; all others, and every value that is not plain, go
through upb and the generated classes (`messages.py`). Both ways give the same (a test says so).
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from guard import semconv
from guard.errors import WireError
from guard.ingest import fields
from guard.ingest.batch import Batch
from guard.ingest.fields import COUNT, FLAG, KINDS, MAX_COUNT, MAX_SECONDS, TEXT
from guard.ingest.memory import Memory
from guard.ingest.messages import Attributes, read_resource, read_span
from guard.wire import AttributeValue, Span

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_VIEW: Final = {
    "Traces": (("resource_spans", 1, _FIELD.TYPE_MESSAGE, "ResourceSpans"),),
    "ResourceSpans": (("resource", 1, _FIELD.TYPE_BYTES, ""), ("scope_spans", 2, _FIELD.TYPE_MESSAGE, "ScopeSpans")),
    "ScopeSpans": (("spans", 2, _FIELD.TYPE_BYTES, ""),),
    "Span": (("attributes", 9, _FIELD.TYPE_BYTES, ""), ("status", 15, _FIELD.TYPE_BYTES, "")),
}
"""`ExportTraceServiceRequest` in so far as it is read; attributes stay encoded, every field as if it could repeat."""


def _views() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kvguard/view.proto", package="kvguard.view", syntax="proto3")
    for message, columns in _VIEW.items():
        made = file.message_type.add(name=message)
        for name, number, kind, of in columns:
            type_name = f".kvguard.view.{of}" if of else None
            made.field.add(name=name, number=number, type=kind, label=_FIELD.LABEL_REPEATED, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"kvguard.view.{name}")) for name in _VIEW}


_VIEWS: Final = _views()
_TRACES: Final = _VIEWS["Traces"]
_SPAN: Final = _VIEWS["Span"]


_Head = tuple[str, Callable[[bytes], tuple[Any, ...]], int, bool, bool]
"""Name, what unpacks the beginning of such a span, its length, whether it repeats, whether it must tell more."""


def _heads(form: str) -> dict[bytes, _Head]:
    """What spans of a name begin with, by the encoded name: tags and ids as in `form`, kind, start and end."""
    found: dict[bytes, _Head] = {}
    for name in fields.OURS:
        head = Struct(f"{form}{2 + len(name)}xBBBQBQ")
        repeats, required = name in fields.REPEATING_SPANS, name in fields.REQUIRED
        found[b"\x2a%c%b" % (len(name), name.encode())] = (name, head.unpack_from, head.size, repeats, required)
    return found


_HEADS: Final = _heads("<2s16s2s8s2s8s")
_ROOT_HEADS: Final = _heads("<2s16s2s8s")  # without a parent's id
_double: Final = Struct("<d").unpack_from
_SECONDS: Final = {
    b"\x0a%c%b\x12\x09\x21" % (len(key), key.encode()): key for key, kind in KINDS.items() if kind == fields.SECONDS
}
_MAX_SECONDS_KEYS: Final = len(_SECONDS) + 256  # also holds keys of others' doubles, as "": not read
_PREFIXES: Final = {
    b"\x0a%c%b" % (len(key), key.encode()): (key, kind, key in fields.REPEATING) for key, kind in KINDS.items()
}
_MP: Final = semconv.LMCACHE_SPAN_PREFIX.encode()
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)

_pairs: Memory[tuple[str, AttributeValue]] = Memory(32768)  # pairs that come again: texts, flags, small numbers
_tails: Memory[tuple[Attributes, bool]] = Memory(8192)  # what follows the times of a span that repeats
_resources: Memory[Attributes] = Memory(256)


def decode(body: bytes, batch: Batch, earliest_ns: int, latest_ns: int) -> None:
    """Reads an `ExportTraceServiceRequest` into the batch.

    Raises:
        WireError: the body is not one.
    """
    try:
        traces = _TRACES.FromString(body)
        for resource_spans in traces.resource_spans:
            spans: list[Span] = []
            for scope_spans in resource_spans.scope_spans:
                encoded = scope_spans.spans[:]
                batch.received += len(encoded)
                for raw in encoded:
                    if not _plain(raw, spans, batch, earliest_ns, latest_ns):
                        read_span(raw, spans, batch, earliest_ns, latest_ns)
            batch.take(_resource(b"".join(resource_spans.resource)), spans)
    except DecodeError as error:
        batch.groups.clear()
        raise WireError(f"body is not an OTLP trace request in protobuf: {error}") from None


def _plain(raw: bytes, spans: list[Span], batch: Batch, earliest_ns: int, latest_ns: int) -> bool:
    """Reads an encoded span of the usual form; False, with nothing done, where it is not of that form."""
    if len(raw) < 64:
        return False
    if raw[28] == 0x22:
        head = _HEADS.get(raw[38 : 40 + raw[39]])
        if head is None:
            return _not_ours(raw, 38, batch)
        name, unpack, size, repeats, required = head
        if len(raw) < size:
            return False
        tag1, trace_id, tag2, span_id, tag4, parent_id, tag6, kind, tag7, start_ns, tag8, end_ns = unpack(raw)
        if tag4 != b"\x22\x08":
            return False
        parent = parent_id.hex()
    else:
        head = _ROOT_HEADS.get(raw[28 : 30 + raw[29]])
        if head is None:
            return _not_ours(raw, 28, batch)
        name, unpack, size, repeats, required = head
        if len(raw) < size:
            return False
        tag1, trace_id, tag2, span_id, tag6, kind, tag7, start_ns, tag8, end_ns = unpack(raw)
        parent = ""
    if tag1 != b"\x0a\x10" or tag2 != b"\x12\x08" or tag6 != 0x30 or tag7 != 0x39 or tag8 != 0x41 or kind > 127:
        return False
    if not earliest_ns <= start_ns <= end_ns <= latest_ns or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return False
    if repeats:
        tail = raw[size:]
        read = _tails.get(tail) or _keep_tail(tail)
    else:
        read = _pairs_of(raw)
    if read is None or (required and fields.missing_problem(name, read[0])):
        return False
    attributes, error = read
    spans.append(Span(name, trace_id.hex(), span_id.hex(), parent, start_ns, end_ns, attributes, kind, error))
    return True


def _not_ours(raw: bytes, at: int, batch: Batch) -> bool:
    """Counts a span with a name of others; False where it has none, or where the server's `mp.*` may be meant."""
    name = raw[at + 2 : at + 2 + raw[at + 1]]
    parent = raw[28:30] == b"\x22\x08" or at == 28
    usual = raw[:2] == b"\x0a\x10" and raw[18:20] == b"\x12\x08" and parent and raw[at] == 0x2A
    if not usual or not name or name.startswith(_MP):
        return False
    batch.ignored += 1
    return True


def _keep_tail(tail: bytes) -> tuple[Attributes, bool] | None:
    read = _pairs_of(tail)
    return read and _tails.keep(tail, read)


def _pairs_of(raw: bytes) -> tuple[Attributes, bool] | None:
    """A span's attributes, and whether it says error; None where not all is plain and right."""
    view = _SPAN.FromString(raw)
    attributes: Attributes = {}
    recall, seconds, double = _pairs.get, _SECONDS.get, _double
    for pair in view.attributes[:]:
        known = recall(pair)
        if known is not None:
            attributes[known[0]] = known[1]
        elif key := seconds(pair[:-8]):
            number = attributes[key] = double(pair, len(pair) - 8)[0]
            if not 0.0 <= number <= MAX_SECONDS:
                return None
        elif key is None and not _other(pair, attributes):
            return None
    attributes.pop("", None)
    status = view.status
    return attributes, bool(status) and _is_error(status[-1])


def _other(pair: bytes, attributes: Attributes) -> bool:
    """Reads a pair that is no number of seconds and was not seen before; False where it is not plain or not right."""
    if pair[:1] != b"\x0a" or len(pair) < 4:
        return False
    mark = pair[1] + 2
    found = _PREFIXES.get(pair[:mark])
    if found is None:
        if pair[mark : mark + 3] == b"\x12\x09\x21" and len(_SECONDS) < _MAX_SECONDS_KEYS:
            _SECONDS[pair[:-8]] = ""
        elif len(pair) <= mark + 4:
            _pairs.keep(pair, ("", 0))
        return True
    key, kind, repeats = found
    size = len(pair)
    if size < mark + 4 or pair[mark] != 0x12 or mark + 2 + pair[mark + 1] != size:
        return False
    tag = pair[mark + 2]
    value: AttributeValue
    if tag == 0x18 and kind == COUNT:
        value = _varint(pair[mark + 3 :])
        if not 0 <= value <= MAX_COUNT:
            return False
    elif tag == 0x0A and kind == TEXT and mark + 4 + pair[mark + 3] == size:
        value = pair[mark + 4 :].decode("utf-8", "replace")
    elif tag == 0x10 and kind == FLAG and size == mark + 4 and pair[-1] < 2:
        value = pair[-1] == 1
    else:
        return False
    attributes[key] = value
    if repeats:
        _pairs.keep(pair, (key, value))
    return True


def _varint(encoded: bytes) -> int:
    """The number; -1 where it is more than 8 bytes long, or not one number."""
    value = encoded[-1]
    if value > 127 or len(encoded) > 8:
        return -1
    for byte in encoded[-2::-1]:
        if byte < 128:
            return -1
        value = value << 7 | byte & 127
    return value


def _is_error(status: bytes) -> bool:
    return status == b"\x18\x02" or Status.FromString(status).code == Status.STATUS_CODE_ERROR


def _resource(encoded: bytes) -> Attributes:
    known = _resources.get(encoded)
    if known is None:
        known = _resources.keep(encoded, read_resource(encoded))
    return dict(known)
