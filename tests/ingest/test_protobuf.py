"""Spans read by hand must come out as the generated classes would have them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard import semconv as s
from guard.ingest import otlp, otlp_json, protobuf
from guard.ingest.batch import Batch
from guard.ingest.fields import KINDS, OURS
from guard.ingest.memory import LONGEST, Memory
from guard.ingest.messages import read_span

EVER = (0, 1 << 63)

VALUES = st.one_of(
    st.floats(0, 6e5), st.floats(), st.integers(0, 1 << 20), st.integers(-(1 << 63), (1 << 63) - 1), st.booleans(),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=140), st.binary(max_size=4), st.none(),
    st.lists(st.text(max_size=3), max_size=2),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(sorted(KINDS)), st.sampled_from(["a", "gen_ai.request.top_p", "x" * 130, ""]))


def slow(raw):
    spans, batch = [], Batch()
    read_span(raw, spans, batch, *EVER)
    return spans, batch


def fast(raw):
    spans, batch = [], Batch()
    plain = protobuf._plain(raw, spans, batch, *EVER)
    return plain, spans, batch


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([*sorted(OURS), "GET /cart"]),
    st.dictionaries(KEYS, VALUES, max_size=6),
    st.sampled_from([b"", b"\x07" * 8, b"\x07" * 3]),
    st.sampled_from([0.0, 1.5, -1.0]),
    st.booleans(),
    st.booleans(),
)
def test_by_hand_or_by_the_generated_classes(new_body, name, attributes, parent, seconds, error, links):
    body = new_body()
    span = body.span(name, attributes, parent=parent, seconds=seconds, error=error)
    if links:
        span.links.add(trace_id=b"\x01" * 16)
        span.flags = 257
    raw = span.SerializeToString()
    expected, account = slow(raw)
    for _ in range(2):  # the second time from memory
        plain, got, ours = fast(raw)
        if plain:
            assert got == expected
            assert (ours.ignored, ours.rejected) == (account.ignored, account.rejected) == (1 - len(expected), 0)
        else:
            assert got == []
            assert ours.ignored == ours.rejected == 0


def _request(**more):
    return {s.INPUT_TOKENS: 300, s.REQUEST_ID: "cmpl-1", s.TTFT: 0.25, s.ABORTED: False, **more}


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        (s.SPAN_REQUEST, _request(**{s.TOKENS_MATCHED: 1 << 30, s.DECISION: "remote", s.RUNNING: 0})),
        (
            s.SPAN_VLLM_REQUEST,
            {s.VLLM_TTFT: 0.1, "gen_ai.request.top_p": -1.0, "gen_ai.request.n": 1, "other": "x" * 90},
        ),
        (s.SPAN_READ, {s.OPERATION: "GET", s.BYTES: 524288, s.KEYS: 1, s.OUTCOME: "ok"}),
        ("GET /cart", {"http.method": "GET"}),
    ],
)
def test_the_usual_form_is_read_by_hand(body, name, attributes):
    for parent in (b"", b"\x01" * 8):
        plain, _, _ = fast(body.span(name, attributes, parent=parent).SerializeToString())
        assert plain


@pytest.mark.parametrize(
    "change",
    [{"trace_state": "a=b"}, {"trace_id": b"\x01"}, {"span_id": bytes(8)}, {"kind": 0}, {"name": ""}, {"name": "mp.x"}],
)
def test_other_forms_are_left_to_the_generated_classes(body, change):
    span = body.span(s.SPAN_REQUEST, _request(), parent=b"\x02" * 8)
    for key, value in change.items():
        setattr(span, key, value)
    assert not fast(span.SerializeToString())[0]


@pytest.mark.parametrize("number", [b"\x05\x06", b"\x85", b"\x85\x06\x07", b"\xff" * 9 + b"\x01"])
def test_what_is_not_one_number_is_none(body, number):
    """A varint that ends before its field does, or not at all, or is longer than any count."""
    value = b"\x18" + number
    pair = b"\x0a%c%b\x12%c%b" % (len(s.POLLS), s.POLLS.encode(), len(value), value)
    raw = body.span(s.SPAN_LOOKUP).SerializeToString() + b"\x4a%c%b" % (len(pair), pair)
    for _ in range(2):
        assert fast(raw)[:2] == (False, [])
    assert slow(raw)[1].rejected == 1


def test_numbers_of_others_are_skipped_whatever_they_are(body):
    for number in (-5.0, float("nan"), float("inf"), 1e300):
        body.span(s.SPAN_DECODE, {"other": number, s.TPOT: 0.5, "count": -7})
    batch = Batch()
    protobuf.decode(body.protobuf(), batch, *EVER)
    assert [span.attributes for span in batch.groups[0][1]] == [{s.TPOT: 0.5}] * 4


def test_many_keys_of_others_do_not_fill_the_memory(body):
    for number in range(2000):
        body.span(s.SPAN_DECODE, {f"other.{number}": 0.5, f"count.{number}": number, s.TPOT: 0.5})
    batch = Batch()
    protobuf.decode(body.protobuf(), batch, *EVER)
    assert batch.accepted == 2000
    assert len(protobuf._SECONDS) <= protobuf._MAX_SECONDS_KEYS
    assert len(protobuf._pairs) <= 32768


@pytest.mark.parametrize("kind", [otlp.PROTOBUF, otlp.JSON])
def test_huge_texts_are_not_remembered_and_not_kept(body, kind):
    huge = "x" * 100_000
    body.resource({s.ENGINE_ID: huge, huge: "y", **{f"k{number}": number for number in range(200)}})
    body.span(s.SPAN_READ, {huge: "y", s.KEYS: 1})
    body.span("mp." + huge)
    body.span("mp.lookup", {huge: "y", "session_id": huge})
    batch = otlp.decode(body.protobuf() if kind == otlp.PROTOBUF else body.json(), content_type=kind)
    ((resource, (read, server)),) = batch.groups
    assert resource[s.ENGINE_ID] == huge[:1024]
    assert len(resource) <= 128
    assert (read.attributes, server.attributes) == ({s.KEYS: 1}, {"session_id": huge[:1024]})
    assert batch.ignored == 1
    for memory in (protobuf._tails, protobuf._resources, protobuf._pairs, otlp_json._tails):
        assert max(map(len, memory), default=0) <= LONGEST


def test_memory_begins_anew_when_it_is_full():
    memory = Memory(3)
    for number in range(10):
        assert memory.keep(bytes((number,)), number) == number
        assert len(memory) <= 3
    assert memory == {b"\x09": 9}
