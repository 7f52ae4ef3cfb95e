import copy
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard import semconv as s
from guard.correlate.join import Joiner

SECOND = 10**9
RESOURCE = {s.SERVICE_INSTANCE_ID: "host:8000/0"}


def join(spans, joiner=None, at=0):
    joiner = joiner or Joiner()
    joiner.add(RESOURCE, spans, at)
    return joiner.advance(at), joiner


def conserved(joiner):
    assert joiner.counts.received == joiner.counts.settled + joiner.waiting


def test_a_whole_request_becomes_one_record(spans, t0):
    parts = spans.one(attempts=2)
    (record,), joiner = join(parts)
    assert dataclasses.asdict(record) | {"fetches": None, "server_spans": None} == {
        "internal_id": "cmpl-1-00000001", "request_id": "cmpl-1", "trace_id": "a" * 32, "span_id": parts[0].span_id,
        "engine_id": "host:8000/0", "model": "m", "backend": "lmcache-mp/resp", "class_": "1k-2k/c0-4",
        "arrival_ns": t0, "prompt_tokens": 2000, "tokens_local": 256, "tokens_matched": 1024, "tokens_loaded": 1024,
        "tokens_computed": 720, "ttft": 0.36, "intake": 0.01, "queue": 0.02, "lookup": 0.03, "slot": 0.04,
        "fetch": 0.1, "resume": 0.05, "prefill": 0.1, "residual": pytest.approx(0.365 - 0.35), "exposed_wait": 0.17,
        "decision": "remote", "reason": "on", "directive_id": "", "running": 3, "waiting": 1, "aborted": False,
        "handoff": False, "simulated": False, "lookup_round_trips": 15, "lookup_polls": 4, "fetches": None,
        "stores": 1, "store_bytes": 4096, "vllm_ttft": 0.365, "vllm_queue": 0.2, "vllm_prefill": 0.1, "vllm_e2e": 2.4,
        "server_spans": None, "output_tokens": 99, "tpot": 0.02, "rtt": None, "rtt_source": "",
        "propensity": None, "clamped": (),
    }  # fmt: skip
    first, second = record.fetches
    assert (first.attempt, first.outcome, first.error_type) == (1, "failed", "timeout")
    assert (second.attempt, second.outcome, second.bytes, second.blocks) == (2, "ok", 2 << 20, 8)
    assert second.ranks == {0: 0.08, 1: 0.09}
    assert (second.reads, second.read_bytes) == (3, 3003)
    assert second.read_seconds == pytest.approx(0.0066)
    assert [span.name for span in record.server_spans] == ["mp.retrieve"] * 2
    assert joiner.counts.joined == len(parts)
    assert not joiner.counts.orphans
    conserved(joiner)


@st.composite
def deliveries(draw):
    """Requests of all kinds, and their spans shuffled, partly doubled, and split into bodies seconds apart."""
    shapes = draw(
        st.lists(
            st.fixed_dictionaries(
                {"attempts": st.integers(1, 3), "ranks": st.integers(0, 3), "reads": st.integers(0, 4)},
                optional={"parents": st.booleans(), "server": st.integers(0, 3)},
            ),
            min_size=1,
            max_size=4,
        )
    )
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    return shapes, rng, draw(st.integers(1, 6)), draw(st.floats(0, 0.5))


@settings(deadline=None, max_examples=150)
@given(deliveries())
def test_order_duplicates_and_splitting_do_not_matter(new_spans, delivery):
    shapes, rng, bodies, doubled = delivery
    maker = new_spans()
    spans = [span for number, shape in enumerate(shapes) for span in maker.one(number, number * 0.001, **shape)]
    expected, _ = join(copy.deepcopy(spans))

    sent = spans + [span for span in spans if rng.random() < doubled]
    rng.shuffle(sent)
    joiner, records = Joiner(lateness_seconds=10.0), []
    for body in range(bodies):
        part = copy.deepcopy(sent[body::bodies])
        records += join(part, joiner, at=body * SECOND)[0]
        conserved(joiner)
    records += joiner.advance(60 * SECOND)
    assert sorted(records, key=lambda record: record.span_id) == expected
    assert joiner.counts.duplicates == len(sent) - len(spans)
    assert joiner.counts.joined == len(spans)
    assert not joiner.counts.orphans
    conserved(joiner)


def test_the_record_is_given_out_at_the_first_token_and_amended_at_the_end(spans):
    parts = spans.one(server=1)
    by_name = {span.name: span for span in parts}
    joiner = Joiner()
    early = [by_name[name] for name in (s.SPAN_LOOKUP, s.SPAN_FETCH)]
    assert join(early, joiner, at=0)[0] == []
    (record,), _ = join([by_name[s.SPAN_REQUEST]], joiner, at=1)
    assert record.vllm_ttft is None
    assert record.residual == pytest.approx(0.01)
    assert joiner.amended == []

    assert join([by_name[s.SPAN_LOAD]], joiner, at=2)[0] == []
    assert joiner.amended == [record]
    assert record.fetches[0].ranks == {1: 0.09}
    joiner.advance(3)
    assert joiner.amended == []
    minutes = 600 * SECOND
    late = [by_name[name] for name in (s.SPAN_VLLM_REQUEST, s.SPAN_DECODE, "mp.retrieve", s.SPAN_STORE)]
    assert join(late, joiner, at=minutes)[0] == []
    assert joiner.amended == [record]
    assert (record.vllm_ttft, record.output_tokens, record.stores, len(record.server_spans)) == (0.365, 99, 1, 1)
    assert record.residual == pytest.approx(0.015)
    assert joiner.counts.amended == 2
    conserved(joiner)


def test_a_request_without_its_fetch_is_given_out_at_the_watermark(spans):
    parts = [span for span in spans.one(server=0) if span.name not in (s.SPAN_FETCH, s.SPAN_LOAD, s.SPAN_READ)]
    records, joiner = join(parts)
    assert records == []
    assert joiner.advance(10 * SECOND - 1) == []
    (record,) = joiner.advance(10 * SECOND)
    assert record.fetches == []
    assert (joiner.counts.records, joiner.counts.incomplete) == (1, 1)
    assert joiner.advance(3600 * SECOND) == []


def test_a_second_attempt_is_waited_for(spans):
    parts = spans.one(attempts=2, server=0)
    second = next(span for span in parts if span.attributes.get(s.ATTEMPT) == 2)
    first = next(span for span in parts if span.attributes.get(s.ATTEMPT) == 1)
    joiner = Joiner()
    assert join([span for span in parts if span is not first], joiner)[0] == []
    (record,), _ = join([first], joiner)
    assert [fetch.span_id for fetch in record.fetches] == [first.span_id, second.span_id]


def test_what_made_no_lookup_is_given_out_at_once(spans):
    root = spans.request(**{s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0, s.DECISION: "skip"})
    (record,), _ = join([root])
    assert record.decision == "skip"


def test_aborted_before_a_first_token(spans):
    (record,), _ = join([spans.request(**{s.TTFT: None, s.ABORTED: True, s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0,
                                          s.TOKENS_LOADED: 0})])  # fmt: skip
    assert (record.aborted, record.ttft, record.residual) == (True, None, None)


def test_reads_under_a_lookup_are_its_round_trips_unless_it_tells_them(spans):
    root = spans.request(**{s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0})
    silent = spans.span(s.SPAN_LOOKUP, root.span_id)
    reads = [spans.span(s.SPAN_READ, silent.span_id) for _ in range(5)]
    (record,), joiner = join([*reads, silent, root])
    assert record.lookup_round_trips == 5
    conserved(joiner)


# -- Request ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", ["cmpl-1-deadbeef", "cmpl-1", "0_cmpl-1-deadbeef", "0_cmpl-1"])
@pytest.mark.parametrize("sends_external", [True, False])
def test_vllm_spans_without_parent_are_found_by_request_id(spans, internal, sends_external):
    parts = spans.one(internal=internal, parents=False)
    if not sends_external:
        del parts[0].attributes[s.REQUEST_ID]
    for order in (parts, parts[::-1]):
        (record,), joiner = join(copy.deepcopy(order))
        assert (record.vllm_e2e, record.output_tokens) == (2.4, 99)
        joiner.advance(20 * SECOND)
        assert joiner.counts.joined == len(parts)
        conserved(joiner)


@pytest.mark.parametrize("seed", range(10))
def test_children_of_a_request_with_n_get_each_their_own_span(spans, seed):
    """n = 3: one external id, one arrival; only the times to the first token differ."""
    ttfts = {f"{index}_cmpl-1-0000000{index}": 0.3 + index / 10 for index in range(3)}
    parts = []
    for internal, ttft in ttfts.items():
        idle = {s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0}
        parts.append(spans.request(1, internal=internal, **{s.TTFT: ttft}, **idle))
        parts.append(spans.span(s.SPAN_VLLM_REQUEST, **{s.REQUEST_ID: "cmpl-1", s.VLLM_TTFT: ttft + 0.004}))
    random.Random(seed).shuffle(parts)
    joiner, records = Joiner(), []
    for at, span in enumerate(parts):
        records += join([span], joiner, at)[0]
    assert {one.internal_id: one.vllm_ttft for one in records} == {
        internal: pytest.approx(ttft + 0.004) for internal, ttft in ttfts.items()
    }
    joiner.advance(20 * SECOND)
    assert joiner.counts.joined == 6


def test_an_id_that_comes_again_later_is_told_apart_by_time(spans):
    idle = {s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0}
    first, again = spans.request(1, 0.0, **idle), spans.request(1, 60.0, internal="cmpl-1-11111111", **idle)
    ends = [
        spans.span(s.SPAN_VLLM_REQUEST, start=start, **{s.REQUEST_ID: "cmpl-1", s.VLLM_TTFT: 0.36, s.VLLM_E2E: e2e})
        for start, e2e in ((60.0, 9.0), (0.0, 4.0))
    ]
    records, _ = join([first, again, *ends])
    assert {record.arrival_ns: record.vllm_e2e for record in records} == {first.start_ns: 4.0, again.start_ns: 9.0}


def test_one_request_id_for_ever_costs_no_more_and_more(spans):
    idle = {s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0}
    joiner = Joiner()
    for number in range(300):
        parts = [spans.request(1, number, **idle)]
        parts += [spans.span(s.SPAN_VLLM_REQUEST, start=number, **{s.REQUEST_ID: "cmpl-1", s.VLLM_TTFT: 0.36})]
        join(parts, joiner, at=number * SECOND)
    joiner.advance(1000 * SECOND)
    assert joiner.counts.joined == 600
    assert max(len(group.requests) for group in joiner._loose._groups.values()) == 64


def test_request_ids_turned_off(spans):
    parts = spans.one(server=0)
    for span in parts:
        span.attributes.pop(s.REQUEST_ID, None)
    parts[0].attributes.pop(s.INTERNAL_ID)
    (record,), joiner = join(parts)
    assert (record.internal_id, record.request_id, record.vllm_e2e, record.output_tokens) == ("", "", 2.4, 99)
    assert joiner.counts.joined == len(parts)


# -- What is lost, and counted ----------------------------------------------------------------------------------------


def test_orphans_are_counted_by_kind_at_the_watermark(spans):
    parts = spans.one(attempts=1, ranks=2, reads=3, server=2)[1:]  # the request span never comes
    joiner = Joiner(lateness_seconds=10.0, patience_seconds=60.0)
    join(parts, joiner)
    assert joiner.waiting == len(parts)
    joiner.advance(60 * SECOND - 1)
    assert joiner.counts.orphans == {}
    joiner.advance(60 * SECOND)
    assert joiner.counts.orphans == {
        "kv.lookup": 1, "kv.fetch": 1, "kv.load": 2, "kv.read": 3, "kv.store": 1, "mp": 2, "decode": 1,
        "llm_request": 1,
    }  # fmt: skip
    assert (joiner.waiting, joiner.pending) == (0, 0)
    loose = joiner._loose
    assert not any((joiner._by_span, joiner._parked, loose, loose._by_parent, loose._groups))
    conserved(joiner)


def test_a_fetch_that_outlives_its_request_amends_it_once(spans):
    """A client gave up on a black hole; the load ended long after the watermark."""
    parts = spans.one(server=0)
    (record,), joiner = join(parts)
    joiner.advance(11 * SECOND)
    late = spans.span(s.SPAN_FETCH, parts[0].span_id, seconds=90.0, **{s.ATTEMPT: 2})
    again = copy.deepcopy([late, *(span for span in parts if span.name == s.SPAN_FETCH)])
    join([late], joiner, 100 * SECOND)
    assert [one.seconds for one in record.fetches] == [0.1, 90.0]
    assert joiner.amended == [record]
    join(again, joiner, 101 * SECOND)
    assert joiner.counts.duplicates == 2
    assert [one.attempt for one in record.fetches] == [1, 2]
    assert joiner.counts.orphans == {}
    conserved(joiner)
    joiner.advance(2000 * SECOND)
    assert not joiner._by_span


def test_duplicates_after_the_watermark_are_still_duplicates(spans):
    parts = [
        span for span in spans.one() if span.name in (s.SPAN_REQUEST, s.SPAN_VLLM_REQUEST, s.SPAN_DECODE, s.SPAN_STORE)
    ]
    joiner = Joiner()
    join(parts, joiner)
    joiner.advance(20 * SECOND)
    records, _ = join(copy.deepcopy(parts), joiner, 21 * SECOND)
    assert records == []
    assert joiner.counts.duplicates == 4
    assert joiner.counts.records == 1


def test_everything_is_forgotten_in_the_end(spans):
    joiner = Joiner(lateness_seconds=1.0, retention_seconds=5.0)
    for number in range(20):
        join(spans.one(number, parents=number % 2 == 0), joiner, number)
    joiner.advance(2 * SECOND)
    joiner.advance(8 * SECOND)
    assert not any((joiner._by_span, joiner._by_session, joiner._loose._groups, joiner._retained, joiner._closing))
    conserved(joiner)


def test_memory_is_bounded(spans):
    """Requests without end, half of them without a request span: the bounds hold after every span."""
    joiner = Joiner(max_pending=50, max_retained=30, max_spans_per_request=10)
    sent = records = 0
    for number in range(400):
        parts = spans.one(number, reads=20, parents=number % 3 == 0)
        if number % 2:
            parts = parts[1:]
        for span in parts:
            joiner.add(RESOURCE, [span], number)
            sent += 1
            assert joiner.pending <= 50
            assert len(joiner._retained) <= 30
            assert len(joiner._parked) <= 200
            assert len(joiner._loose) <= 200
        records += len(joiner.advance(number))
    assert records == 200  # a request whose own span came is never lost
    assert sum(joiner.counts.evicted.values()) > 0
    assert joiner.counts.overflow["kv.read"] > 0
    assert joiner.counts.received == sent
    conserved(joiner)
    assert len(joiner._by_span) <= 50 * 4 + 30
    joiner.advance(10_000 * SECOND)
    assert joiner.waiting == 0
    conserved(joiner)


@pytest.mark.parametrize("fetch_first", [True, False])
def test_reads_of_one_body_count_once_and_only_up_to_the_bound(spans, fetch_first):
    """They are taken many at a time; a body that holds one twice, or more than a request may have, loses no others."""
    root, fetch = spans.request(), spans.span(s.SPAN_FETCH, **{s.ATTEMPT: 1, s.BYTES: 5})
    fetch.parent_id = root.span_id
    reads = [spans.span(s.SPAN_READ, fetch.span_id, seconds=0.001, **{s.BYTES: 10 + index}) for index in range(9)]
    joiner = Joiner(max_spans_per_request=8)
    bodies = [[*reads[:4], reads[0]], [reads[3], *reads[4:]]]
    for body in [[fetch], *bodies, [root]] if fetch_first else [*bodies, [fetch, root]]:
        joiner.add(RESOURCE, body, 0)
    joiner.advance(0)
    (record,) = joiner.advance(20 * SECOND)
    kept = 7  # the fetch is one of the eight
    assert record.fetches[0].reads == kept
    assert record.fetches[0].read_bytes == sum(range(10, 10 + kept))
    assert record.fetches[0].read_seconds == pytest.approx(kept * 0.001)
    assert joiner.counts.duplicates == 2
    assert joiner.counts.overflow == {"kv.read": 2}
    conserved(joiner)


def test_unknown_spans_are_ignored(spans):
    records, joiner = join([spans.span("GET /cart")])
    assert records == []
    assert joiner.counts.ignored == 1
    conserved(joiner)


# -- Counts that cannot be (case A14) ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "kept", "named"),
    [
        ({s.TOKENS_LOCAL: -5}, (2000, 0, 1024, 1024, 720), (s.TOKENS_LOCAL,)),
        ({s.TOKENS_LOCAL: 1500}, (2000, 1500, 500, 500, 720), (s.TOKENS_MATCHED, s.TOKENS_LOADED)),  # counted twice
        ({s.TOKENS_LOADED: 9999}, (2000, 256, 1024, 1744, 720), (s.TOKENS_LOADED,)),
        ({s.TOKENS_COMPUTED: 2001}, (2000, 256, 1024, 1024, 2000), (s.TOKENS_COMPUTED,)),
        ({s.INPUT_TOKENS: -1}, (0, 0, 0, 0, 0), (s.INPUT_TOKENS, s.TOKENS_LOCAL, s.TOKENS_MATCHED, s.TOKENS_LOADED,
                                                s.TOKENS_COMPUTED)),
        ({}, (2000, 256, 1024, 1024, 720), ()),
    ],
)  # fmt: skip
def test_hit_tokens_that_cannot_be_are_clamped_counted_and_named(spans, sent, kept, named):
    (record,), joiner = join(spans.one(**sent))
    got = (record.prompt_tokens, record.tokens_local, record.tokens_matched, record.tokens_loaded)
    assert (*got, record.tokens_computed) == kept
    assert record.clamped == named
    assert joiner.counts.clamped == dict.fromkeys(named, 1)


def test_negative_times_are_clamped(spans):
    (record,), _ = join(spans.one(**{s.TIME_QUEUE: -0.5}))
    assert (record.queue, record.clamped) == (0.0, (s.TIME_QUEUE,))


def test_several_engines_do_not_mix_and_the_resource_names_an_engine_that_the_span_does_not(spans):
    idle = {s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0}
    joiner = Joiner()
    joiner.add({}, [spans.request(1, **idle)], 0)
    joiner.add({s.SERVICE_INSTANCE_ID: "host:8001/1"}, [spans.request(2, **{s.ENGINE_ID: None}, **idle)], 0)
    assert [record.engine_id for record in joiner.advance(0)] == ["host:8000/0", "host:8001/1"]


def test_a_restarted_engine_counts_no_request_twice(spans):
    """After a restart the same client id comes with new spans: two records, each with its own parts (case A15)."""
    before, after = spans.one(1, 0.0), spans.one(1, 30.0)
    records, joiner = join([*before, *after])
    assert len(records) == 2
    assert all(len(record.fetches) == 1 and record.stores == 1 for record in records)
    assert joiner.counts.joined == len(before) + len(after)
