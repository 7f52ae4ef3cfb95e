import contextlib
import gzip
import json
import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from guard import semconv as s
from guard.errors import TooLargeError, WireError
from guard.ingest import otlp
from guard.wire import Span

KINDS = [otlp.PROTOBUF, otlp.JSON]
TRACE = "0" * 31 + "1"


def decode(data, kind=otlp.PROTOBUF, **more):
    return otlp.decode(data, content_type=kind, **more)


def encoded(body, kind):
    return body.protobuf() if kind == otlp.PROTOBUF else body.json()


def spans_of(batch):
    return [span for _, spans in batch.groups for span in spans]


def request(**more):
    return {s.INPUT_TOKENS: 2000, s.REQUEST_ID: "cmpl-1", s.TTFT: 0.25, s.ABORTED: False, **more}


@pytest.mark.parametrize("kind", KINDS)
def test_a_span_is_read_whole(body, now_ns, kind):
    root = body.span(s.SPAN_REQUEST, request(**{s.TIME_FETCH: 0.125, s.DECISION: "remote"}), seconds=0.25)
    body.span(
        s.SPAN_FETCH,
        {s.BYTES: 1 << 40, s.TOKENS: 300, s.ATTEMPT: 1, s.BLOCKS: 0, s.NETWORK_RTT: 2.5e-4, s.OUTCOME: "failed"},
        parent=root.span_id,
        error=True,
    )
    batch = decode(encoded(body, kind), kind)
    ((resource, spans),) = batch.groups
    assert resource == {"service.name": "vllm"}
    assert spans == [
        Span(
            s.SPAN_REQUEST, TRACE, "0" * 15 + "1", "", now_ns, now_ns + 250_000_000,
            request(**{s.TIME_FETCH: 0.125, s.DECISION: "remote"}), 3, False,
        ),
        Span(
            s.SPAN_FETCH, TRACE, "0" * 15 + "2", "0" * 15 + "1", now_ns, now_ns + 10_000_000,
            {s.BYTES: 1 << 40, s.TOKENS: 300, s.ATTEMPT: 1, s.BLOCKS: 0, s.NETWORK_RTT: 2.5e-4, s.OUTCOME: "failed"},
            3, True,
        ),
    ]  # fmt: skip
    assert (batch.received, batch.accepted, batch.rejected, batch.ignored, batch.message) == (2, 2, 0, 0, "")


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
COUNTS = st.integers(0, 1 << 50)
TIMES = st.floats(0, 6e5)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {s.INPUT_TOKENS: COUNTS},
            optional={
                s.REQUEST_ID: TEXTS, s.BACKEND: TEXTS, s.DECISION: TEXTS, s.RUNNING: COUNTS, s.TOKENS_LOCAL: COUNTS,
                s.TTFT: TIMES, s.TIME_FETCH: TIMES, s.ABORTED: st.booleans(), "other": TEXTS, "other.number": TIMES,
                "other.integer": st.integers(-(1 << 63), (1 << 63) - 1),
            },
        ),
        max_size=5,
    )
)  # fmt: skip
def test_both_encodings_decode_alike(new_body, rows):
    body = new_body()
    for row in rows:
        body.span(s.SPAN_REQUEST, row)
    known = [{key: value for key, value in row.items() if not key.startswith("other")} for row in rows]
    for kind in KINDS:
        got = [span.attributes for span in spans_of(decode(encoded(body, kind), kind))]
        assert got == known
        assert [[type(value) for value in one.values()] for one in got] == [
            [type(one[key]) for key in two] for one, two in zip(known, got, strict=True)
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"seconds": -1.0}, "ends before its start"),
        ({"attributes": request(**{s.INPUT_TOKENS: -5})}, "gen_ai.usage.input_tokens is negative"),
        ({"attributes": request(**{s.TTFT: float("nan")})}, "kvguard.ttft is absurd"),
        ({"attributes": request(**{s.TTFT: float("inf")})}, "kvguard.ttft is absurd"),
        ({"attributes": request(**{s.TTFT: -0.5})}, "kvguard.ttft is negative"),
        ({"attributes": request(**{s.TTFT: "soon"})}, "kvguard.ttft is not a number"),
        ({"attributes": request(**{s.INPUT_TOKENS: 1 << 60})}, "gen_ai.usage.input_tokens is absurd"),
        ({"attributes": request(**{s.INPUT_TOKENS: 1.5})}, "gen_ai.usage.input_tokens is not an integer"),
        ({"attributes": request(**{s.BACKEND: ["a", "b"]})}, "kvguard.backend is not text"),
        ({"attributes": request(**{s.BACKEND: {"a": "b"}})}, "kvguard.backend is not text"),
        ({"attributes": request(**{s.BACKEND: b"raw"})}, "kvguard.backend is not text"),
        ({"attributes": request(**{s.BACKEND: None})}, "kvguard.backend is not text"),
        ({"attributes": request(**{s.REQUEST_ID: "x" * 2000})}, "gen_ai.request.id is too long"),
        ({"attributes": request(**{s.ABORTED: 1})}, "kvguard.aborted is not true or false"),
        ({"attributes": {s.TTFT: 1.0}}, "gen_ai.usage.input_tokens is missing"),
        ({"trace_id": b""}, "has no proper trace id or span id"),
        ({"trace_id": bytes(16)}, "has no proper trace id or span id"),
        ({"span_id": b"\x01" * 7}, "has no proper trace id or span id"),
        ({"parent_span_id": b"\x01" * 9}, "has no proper parent id"),
        ({"start": 5}, "lies absurdly far in the past or future"),
        ({"start": 5_000_000_000 * 10**9}, "lies absurdly far in the past or future"),
        ({"name": ""}, "has no name"),
    ],
)
def test_a_broken_span_costs_only_itself(body, kind, broken, reason):
    body.span(s.SPAN_LOOKUP, {s.POLLS: 1})
    body.span(**{"name": s.SPAN_REQUEST, "attributes": request(), **broken})
    body.span(s.SPAN_FETCH, {s.BYTES: 5})
    batch = decode(encoded(body, kind), kind)
    assert [span.name for span in spans_of(batch)] == [s.SPAN_LOOKUP, s.SPAN_FETCH]
    assert (batch.received, batch.accepted, batch.rejected) == (3, 2, 1)
    assert reason in batch.message


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_held_against_the_clock_when_there_is_one(body, now_ns, kind):
    body.span(s.SPAN_LOOKUP, start=now_ns - 86_300 * 10**9)
    body.span(s.SPAN_LOOKUP, start=now_ns - 86_500 * 10**9)
    body.span(s.SPAN_LOOKUP, start=now_ns + 86_500 * 10**9)
    assert decode(encoded(body, kind), kind).accepted == 3
    assert decode(encoded(body, kind), kind, now_ns=now_ns).rejected == 2


@pytest.mark.parametrize("kind", KINDS)
def test_spans_of_others_are_ignored_and_counted(body, kind):
    body.resource({"service.name": "shop"}, scope="github.com/acme/shop/v2")
    body.span("GET /cart", {"http.method": "GET"})
    body.resource({"service.name": "vllm"}, scope="vllm.llm_engine/tracing")
    body.span(s.SPAN_VLLM_REQUEST, {s.VLLM_TTFT: 0.2, "gen_ai.request.top_p": 0.9})
    batch = decode(encoded(body, kind), kind)
    assert (batch.received, batch.ignored, batch.rejected) == (2, 1, 0)
    assert batch.groups[0][0] == {"service.name": "vllm"}
    assert spans_of(batch)[0].attributes == {s.VLLM_TTFT: 0.2}


@pytest.mark.parametrize("kind", KINDS)
def test_spans_of_the_lmcache_server_keep_their_scalars(body, kind):
    attributes = {s.LMCACHE_SESSION_ID: "cmpl-1-deadbeef", "found": "15", "nbytes": 3, "list": ["a"], "raw": b"x"}
    body.span("mp.retrieve", {**attributes, "bad": float("nan")})
    (span,) = spans_of(decode(encoded(body, kind), kind))
    assert span.attributes == {s.LMCACHE_SESSION_ID: "cmpl-1-deadbeef", "found": "15", "nbytes": 3}


def test_json_takes_numbers_texts_unknown_keys_and_upper_case(body):
    body.span(s.SPAN_REQUEST, request(**{s.TTFT: 1.0}))
    tree = body.tree()
    span = tree["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    span.update(spanId="ABCDEF0123456789", startTimeUnixNano=int(span["startTimeUnixNano"]), flags=257, events=[{}])
    for pair in span["attributes"]:
        if pair["key"] == s.INPUT_TOKENS:
            pair["value"] = {"intValue": 2000}
        if pair["key"] == s.TTFT:
            pair["value"] = {"doubleValue": 1}
    tree["resourceSpans"][0]["schemaUrl"] = "https://opentelemetry.io/schemas/1.30.0"
    (got,) = spans_of(decode(json.dumps(tree).encode(), otlp.JSON))
    assert got.span_id == "abcdef0123456789"
    assert got.attributes == request(**{s.TTFT: 1.0})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"spanId": "xyz!xyz!xyz!xyz!"}, "not hex"),
        ({"spanId": 5}, "Expected `str`"),
        ({"startTimeUnixNano": "yesterday"}, "Expected `int`"),
        ({"attributes": [{"key": s.POLLS, "value": {"intValue": 1.5}}]}, "Expected `int"),
        ({"attributes": "none"}, "Expected `array"),
    ],
)
def test_json_of_the_wrong_type_costs_only_its_span(body, change, reason):
    body.span(s.SPAN_LOOKUP, {s.POLLS: 1})
    body.span(s.SPAN_LOOKUP, {s.POLLS: 2})
    tree = body.tree()
    tree["resourceSpans"][0]["scopeSpans"][0]["spans"][0].update(change)
    batch = decode(json.dumps(tree).encode(), otlp.JSON)
    assert [span.attributes for span in spans_of(batch)] == [{s.POLLS: 2}]
    assert (batch.received, batch.rejected) == (2, 1)
    assert reason in batch.message


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_bodies_are_refused(body, kind):
    for _ in range(3):
        body.span(s.SPAN_REQUEST, request())
    data = encoded(body, kind)
    for cut in range(1, len(data) - 1, 7):
        with pytest.raises(WireError, match="not an OTLP"):
            decode(data[:cut], kind)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(KINDS))
def test_garbage_never_escapes_as_another_error(data, kind):
    with contextlib.suppress(WireError):
        decode(data, kind)


@settings(deadline=None)
@given(st.data())
def test_flipped_bytes_never_escape_as_another_error(new_body, data):
    body = new_body()
    body.span(s.SPAN_REQUEST, request(), error=True)
    body.span("mp.store", {s.LMCACHE_SESSION_ID: "a", "n": 5})
    raw = bytearray(body.protobuf())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = decode(bytes(raw))
    except WireError:
        return
    assert batch.received == batch.accepted + batch.ignored + batch.rejected
    assert len(spans_of(batch)) == batch.accepted


@pytest.mark.parametrize("kind", ["text/plain", "", "application/grpc", "multipart/form-data; boundary=x"])
def test_other_content_types_are_refused_with_what_is_accepted(kind):
    with pytest.raises(WireError, match="application/x-protobuf or application/json"):
        decode(b"", kind)
    assert not otlp.accepts(kind)


def test_content_types_may_have_parameters(body):
    body.span(s.SPAN_LOOKUP)
    assert decode(body.json(), "Application/JSON; charset=utf-8").accepted == 1
    assert otlp.accepts("application/x-protobuf;v=1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress), ("identity", bytes), ("", bytes)],
)
def test_content_encodings(body, kind, encoding, pack):
    body.span(s.SPAN_LOOKUP, {s.POLLS: 3})
    batch = decode(pack(encoded(body, kind)), kind, content_encoding=encoding)
    assert spans_of(batch)[0].attributes == {s.POLLS: 3}


def test_gzip_members_in_a_row(body):
    body.span(s.SPAN_LOOKUP)
    data = body.protobuf()
    packed = gzip.compress(data[:40]) + gzip.compress(data[40:])
    assert decode(packed, content_encoding="gzip").accepted == 1
    with pytest.raises(WireError, match="members"):
        decode(gzip.compress(b"") * 1000, content_encoding="gzip")


@pytest.mark.parametrize(
    ("data", "encoding", "problem"),
    [
        (gzip.compress(b"x" * 5000, mtime=0)[:-12], "gzip", "truncated"),
        (b"not gzip at all", "gzip", "broken"),
        (b"x", "zstd", "not known"),
        (b"x", "br", "not known"),
    ],
)
def test_bad_content_encodings(data, encoding, problem):
    with pytest.raises(WireError, match=problem):
        decode(data, content_encoding=encoding)


def test_a_gzip_bomb_costs_no_more_than_the_limit():
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(128)) + packer.flush()
    limits = otlp.Limits(max_decompressed=1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match="unpacks to more than 1048576"):
            decode(bomb, content_encoding="gzip", limits=limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20  # of the 128 MiB in the bomb


def test_a_body_over_the_limit_is_refused_as_sent():
    with pytest.raises(TooLargeError, match="104857600 bytes is larger than 16777216"):
        decode(bytes(100 << 20))


def test_unpacked_size_at_the_limit_is_accepted(body):
    body.span(s.SPAN_LOOKUP)
    data = body.protobuf()
    packed = gzip.compress(data)
    assert decode(packed, content_encoding="gzip", limits=otlp.Limits(max_decompressed=len(data))).accepted == 1
    with pytest.raises(TooLargeError):
        decode(packed, content_encoding="gzip", limits=otlp.Limits(max_decompressed=len(data) - 1))


def test_values_that_repeat_are_read_right_also_when_many_differ(body):
    rng = random.Random(5)
    values = [rng.randrange(1 << 45) for _ in range(2000)] + [0, 127, 128, 16383, 16384]
    for value in values * 2:
        body.span(s.SPAN_FETCH, {s.BYTES: value})
    assert [span.attributes[s.BYTES] for span in spans_of(decode(body.protobuf()))] == values * 2


def test_an_attribute_in_an_unusual_but_legal_form_is_read(body):
    """A pair whose value comes before its key, and a varint with padding."""
    span = body.span(s.SPAN_LOOKUP)
    key = s.POLLS.encode()
    odd = b"\x12\x02\x18\x07" + b"\x0a" + bytes((len(key),)) + key
    padded = b"\x0a" + bytes((len(key),)) + key + b"\x12\x03\x18\x87\x00"
    for pair, expected in ((odd, {s.POLLS: 7}), (padded, {s.POLLS: 7})):
        raw = span.SerializeToString() + b"\x4a" + bytes((len(pair),)) + pair
        scope = b"\x12" + _varint(len(raw)) + raw
        resource = b"\x12" + _varint(len(scope)) + scope
        (got,) = spans_of(decode(b"\x0a" + _varint(len(resource)) + resource))
        assert got.attributes == expected


def test_the_message_stays_short_when_reasons_are_many(body):
    for number in range(100):
        body.span(f"mp.{number}", start=5)
    batch = decode(body.protobuf())
    assert batch.rejected == 100
    assert len(batch.reasons) == 33
    assert batch.reasons["other reasons"] == 68


def test_responses():
    assert otlp.encode_response(content_type=otlp.PROTOBUF) == b""
    assert otlp.encode_response(content_type=otlp.JSON) == b"{}"
    told = ExportTraceServiceResponse.FromString(otlp.encode_response(3, "bad times (3 spans)", otlp.PROTOBUF))
    assert (told.partial_success.rejected_spans, told.partial_success.error_message) == (3, "bad times (3 spans)")
    assert json.loads(otlp.encode_response(3, "bad", otlp.JSON + "; charset=utf-8")) == {
        "partialSuccess": {"rejectedSpans": "3", "errorMessage": "bad"}
    }


def test_doubles_keep_every_bit(body):
    rng = random.Random(1)
    values = [struct.unpack("<d", struct.pack("<Q", rng.randrange(0x4110000000000000)))[0] for _ in range(500)]
    for value in values:
        body.span(s.SPAN_DECODE, {s.TPOT: value})
    for kind in KINDS:
        assert [span.attributes[s.TPOT] for span in spans_of(decode(encoded(body, kind), kind))] == values


def _varint(value):
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes((*data, value))
