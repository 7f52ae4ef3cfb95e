"""Requests from arrival to their last load, on a clock that moves only when told."""

from dataclasses import replace
from typing import Any

import pytest

from guard import semconv
from guard.connectors import LMCACHE_MP, MOONCAKE_STORE, Capability
from guard.costs import Costs
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.table import ORPHAN_NS, RequestTable
from guard.pace import PERMIT_NS
from guard.wire import Span
from tests.hook.fakes_vllm import Clock, FakeBlocks, FakeRequest, FakeStatus

BACKEND = Backend(
    label="lmcache-mp/resp", capability=LMCACHE_MP, address="h", port=5555, block_tokens=16, rank_bytes=100, ranks=2
)
SCOPE = Scope("h:8000/0", "tiny")


class Bench:
    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.recorder = Recorder()
        self.table = RequestTable(self.recorder, SCOPE, clock=self.clock, wall=self.clock.wall, **options)

    def spans(self) -> list[Span]:
        return [span for record in self.recorder.drain(1000) for span in record.spans()]

    def arrive(self, request: FakeRequest) -> Any:
        request.arrival_time = self.clock.wall_seconds()
        self.clock.tick(5)
        return self.table.arrive(request)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def fetched(bench: Bench, request: FakeRequest, tokens: int = 2048) -> Any:
    """A request up to its blocks: 5 ms intake, 7 ms queue, 20 ms lookup, 3 ms for a slot."""
    state = bench.arrive(request)
    leg = bench.table.leg(state, 1, BACKEND)
    bench.clock.tick(7)
    leg.start = leg.first_poll = bench.clock()
    leg.polls = 3
    bench.clock.tick(20)
    leg.end = bench.clock()
    leg.matched = tokens
    bench.clock.tick(3)
    return bench.table.allocated(state, leg, FakeBlocks(*range(1, 251)), tokens, asynchronous=True)


def inflight(bench: Bench) -> tuple[int, int]:
    pace = bench.table.pace(BACKEND)
    pace.age_out(bench.clock())
    return pace.inflight, pace.inflight_bytes


def test_the_seven_parts_are_each_measured_and_sum_to_ttft(bench: Bench) -> None:
    request = FakeRequest()
    fetched(bench, request)
    bench.clock.tick(40)
    bench.table.loaded({request.request_id})
    bench.clock.tick(2)
    bench.table.scheduled([request.request_id], 1)
    bench.clock.tick(50)
    request.num_output_tokens = 1
    bench.table.outputs()
    root, lookup, fetch = bench.spans()
    parts = [root.attributes[name] for name in semconv.TIME_PARTS]
    assert parts == pytest.approx([0.005, 0.007, 0.020, 0.003, 0.040, 0.002, 0.050])
    assert sum(parts) == pytest.approx(root.attributes[semconv.TTFT])
    assert root.attributes[semconv.EXPOSED_WAIT] == pytest.approx(0.060)
    assert root.seconds == pytest.approx(0.127)
    assert (root.attributes[semconv.DECISION], root.attributes[semconv.TOKENS_LOADED]) == ("remote", 2048)
    assert root.attributes[semconv.TOKENS_COMPUTED] == 4000 - 2048
    assert lookup.seconds == pytest.approx(0.020)
    assert lookup.attributes[semconv.POLLS] == 3
    assert fetch.seconds == pytest.approx(0.040)
    assert fetch.attributes[semconv.BYTES] == 2048 * 200
    assert fetch.attributes[semconv.BLOCKS] == 128
    assert (fetch.attributes[semconv.ATTEMPT], fetch.attributes[semconv.OUTCOME]) == (1, "ok")
    assert lookup.parent_id == fetch.parent_id == root.span_id
    assert {span.trace_id for span in (root, lookup, fetch)} == {root.trace_id}


def test_the_first_token_is_seen_at_once_and_the_decode_at_the_end(bench: Bench) -> None:
    request = FakeRequest()
    bench.arrive(request)
    bench.table.scheduled([request.request_id], 1)
    bench.table.outputs()
    assert bench.spans() == []
    bench.clock.tick(10)
    request.num_output_tokens = 1
    bench.table.outputs()
    assert [span.name for span in bench.spans()] == [semconv.SPAN_REQUEST]
    bench.clock.tick(90)
    request.num_output_tokens = 10
    bench.table.finished(request)
    (decode,) = bench.spans()
    assert decode.name == semconv.SPAN_DECODE
    assert decode.attributes[semconv.OUTPUT_TOKENS] == 10
    assert decode.attributes[semconv.TPOT] == pytest.approx(0.010)
    assert len(bench.table) == 0


def test_a_request_that_ends_with_its_first_token_has_both_spans(bench: Bench) -> None:
    request = FakeRequest(num_output_tokens=1)
    bench.arrive(request)
    bench.table.scheduled([request.request_id], 1)
    bench.table.finished(request)
    bench.table.finished(request)  # a second child of a MultiConnector
    names = [span.name for span in bench.spans()]
    assert names == [semconv.SPAN_REQUEST, semconv.SPAN_DECODE]


def test_an_abort_before_the_first_token_has_no_ttft_and_its_load_is_told_when_it_ends(bench: Bench) -> None:
    request = FakeRequest()
    attempt = fetched(bench, request)
    bench.clock.tick(10)
    request.status = FakeStatus("FINISHED_ABORTED")
    bench.table.finished(request)
    root, lookup = bench.spans()
    assert root.attributes[semconv.ABORTED] is True
    assert semconv.TTFT not in root.attributes
    assert root.attributes[semconv.TIME_FETCH] == pytest.approx(0.010)
    assert lookup.name == semconv.SPAN_LOOKUP
    assert inflight(bench) == (1, 2048 * 200)
    bench.clock.tick(25)
    bench.table.loaded({request.request_id})
    (fetch,) = bench.spans()
    assert fetch.seconds == pytest.approx(0.035)
    assert fetch.parent_id == root.span_id
    assert inflight(bench) == (0, 0)
    assert attempt.blocks is None


def test_a_synchronous_load_that_ended_its_request_is_told_as_failed(bench: Bench) -> None:
    request = FakeRequest(status=FakeStatus("FINISHED_ERROR"))  # kv_load_failure_policy "fail"
    state = bench.arrive(request)
    leg = bench.table.leg(state, 1, BACKEND)
    bench.table.allocated(state, leg, FakeBlocks(1), 512, asynchronous=False)
    bench.clock.tick(10)
    bench.table.finished(request)
    fetch = next(span for span in bench.spans() if span.name == semconv.SPAN_FETCH)
    assert fetch.attributes[semconv.OUTCOME] == "failed"
    assert fetch.attributes[semconv.ERROR_TYPE] == "finished_error"
    assert fetch.error


def test_a_load_that_never_ends_gives_its_permit_back_and_is_told_as_lost(bench: Bench) -> None:
    request = FakeRequest()
    fetched(bench, request)
    bench.table.finished(request)
    bench.spans()
    bench.clock.now += PERMIT_NS - 1
    assert inflight(bench)[0] == 1
    bench.clock.now += 2
    assert inflight(bench) == (0, 0)
    bench.clock.now += ORPHAN_NS
    bench.table.outputs()
    (fetch,) = bench.spans()
    assert (fetch.attributes[semconv.OUTCOME], fetch.attributes[semconv.ERROR_TYPE]) == ("failed", "lost")


@pytest.mark.parametrize(("capability", "slow"), [(LMCACHE_MP, False), (MOONCAKE_STORE, True)])
def test_a_load_whose_data_came_with_the_lookup_tells_nothing_of_the_link(
    bench: Bench, capability: Capability, slow: bool
) -> None:
    backend = replace(BACKEND, label="b", capability=capability)
    pace = bench.table.pace(backend)
    pace.learn(Costs({"seconds": 0.002, "lookup_seconds": 0.1}, {"b": 1e-4}))
    for _ in range(2):
        request = FakeRequest()
        state = bench.arrive(request)
        bench.table.allocated(state, bench.table.leg(state, 1, backend), FakeBlocks(1), 1024, asynchronous=True)
        bench.clock.tick(60)  # 30 times the fetch, half of the read
        assert (pace.overdue(bench.clock()) > 1.0) is slow
        bench.table.loaded({request.request_id})
    assert pace.inflight == 0
    assert (pace.slowdown(bench.clock()) > 20.0) is slow
    state = bench.arrive(FakeRequest())
    bench.table.allocated(state, bench.table.leg(state, 1, backend), FakeBlocks(1), 1024, asynchronous=True)
    bench.clock.tick(500)
    assert pace.overdue(bench.clock()) > 4.0  # one that is stuck is seen on either


def test_failed_blocks_tell_how_much_was_good(bench: Bench) -> None:
    attempt = fetched(bench, FakeRequest("a"))  # blocks 1..250, the first 128 of them loaded
    bench.table.failed_blocks({999})
    assert not attempt.failed
    bench.table.failed_blocks({101})
    assert attempt.loaded == 100 * 16
    bench.table.failed_blocks({120})
    assert attempt.loaded == 100 * 16
    bench.table.loaded({"a"})
    assert attempt.outcome == "partial"
    assert bench.table.get("a").load_failed
    whole = fetched(bench, FakeRequest("b"))
    bench.table.failed_blocks({1})
    bench.table.failed_blocks({50})
    bench.table.loaded({"b"})
    assert (whole.outcome, whole.loaded) == ("failed", 0)


def test_a_second_attempt_counts_on_and_a_failed_one_stays_in_the_fetch_time(bench: Bench) -> None:
    request = FakeRequest()
    fetched(bench, request)
    state = bench.table.get(request.request_id)
    bench.clock.tick(30)
    bench.table.failed({request.request_id}, "recv")
    bench.table.loaded({request.request_id})
    second = bench.table.allocated(state, state.legs[1], FakeBlocks(), 1024, asynchronous=True)
    assert second.number == 2
    bench.clock.tick(12)
    bench.table.loaded({request.request_id})
    bench.table.scheduled([request.request_id], 1)
    request.num_output_tokens = 1
    bench.table.outputs()
    root, _, failed, ok = bench.spans()
    assert root.attributes[semconv.TIME_FETCH] == pytest.approx(0.042)
    assert failed.error
    assert failed.attributes[semconv.ERROR_TYPE] == "recv"
    assert [span.attributes[semconv.ATTEMPT] for span in (failed, ok)] == [1, 2]
    assert root.attributes[semconv.TOKENS_LOADED] == 1024


def test_a_wall_clock_that_steps_back_moves_spans_but_makes_no_negative_time(bench: Bench) -> None:
    request = FakeRequest()
    fetched(bench, request)
    bench.clock.offset -= 3600 * 10**9
    bench.clock.tick(40)
    bench.table.loaded({request.request_id})
    bench.table.scheduled([request.request_id], 1)
    request.num_output_tokens = 1
    bench.table.outputs()
    for span in bench.spans():
        assert span.seconds >= 0
    late = FakeRequest("late", arrival_time=bench.clock.wall_seconds() + 100)
    state = bench.table.arrive(late)
    assert state.arrival == state.seen


def test_absurd_match_counts_are_clamped_and_tokens_conserved(bench: Bench) -> None:
    request = FakeRequest(num_prompt_tokens=100)
    state = bench.arrive(request)
    leg = bench.table.leg(state, 1, BACKEND)
    leg.first_poll = leg.start = leg.end = bench.clock()
    leg.polls = 1
    leg.local = 64
    leg.matched = -5
    bench.table.finished(request)
    root = bench.spans()[0].attributes
    counts = [root[name] for name in (semconv.TOKENS_LOCAL, semconv.TOKENS_LOADED, semconv.TOKENS_COMPUTED)]
    assert sum(counts) == 100
    assert all(count >= 0 for count in counts)
    assert root[semconv.TOKENS_MATCHED] == 0


PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def test_the_callers_trace_is_joined_and_vllms_span_is_put_below_ours() -> None:
    bench = Bench(trace_parent=True)
    headers = {"traceparent": PARENT, "tracestate": "x=1"}
    request = FakeRequest(trace_headers=headers)
    bench.arrive(request)
    bench.table.finished(request)
    root = bench.spans()[0]
    assert (root.trace_id, root.parent_id) == ("ab" * 16, "cd" * 8)
    assert request.trace_headers == {"traceparent": f"00-{'ab' * 16}-{root.span_id}-01", "tracestate": "x=1"}
    assert headers["traceparent"] == PARENT  # a copy was made


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "x=1"}, {"traceparent": "00-zz-1-01"}])
def test_headers_are_left_alone_where_there_is_no_parent(headers: dict[str, str] | None) -> None:
    bench = Bench(trace_parent=True)
    request = FakeRequest(trace_headers=headers)
    bench.arrive(request)
    assert request.trace_headers is headers
    bench.table.finished(request)
    assert bench.spans()[0].parent_id == ""


def test_headers_are_left_alone_where_our_spans_go_elsewhere_and_unsampled_traces_are_marked(bench: Bench) -> None:
    headers = {"traceparent": PARENT[:-1] + "0"}
    request = FakeRequest(trace_headers=headers)
    bench.arrive(request)
    assert request.trace_headers is headers
    bench.table.finished(request)
    root = bench.spans()[0]
    assert root.trace_id == "ab" * 16
    assert root.attributes[semconv.SAMPLED] is False


def test_ids_can_be_kept_inside() -> None:
    bench = Bench()
    bench.table.scope = Scope("h:8000/0", "tiny", request_ids=False, salt=b"s")
    for name in ("a", "b"):
        request = FakeRequest(f"secret-{name}-0123abcd")
        bench.arrive(request)
        bench.table.finished(request)
    first, second = bench.spans()
    assert semconv.REQUEST_ID not in first.attributes
    hidden = [span.attributes[semconv.INTERNAL_ID] for span in (first, second)]
    assert hidden[0] != hidden[1]
    assert all(len(value) == 16 and "secret" not in value for value in hidden)


def test_the_external_id_is_the_internal_one_without_its_suffix(bench: Bench) -> None:
    request = FakeRequest("1_cmpl-x-0-0123abcd")
    bench.arrive(request)
    bench.table.finished(request)
    attributes = bench.spans()[0].attributes
    assert attributes[semconv.REQUEST_ID] == "1_cmpl-x-0"
    assert attributes[semconv.INTERNAL_ID] == "1_cmpl-x-0-0123abcd"


def test_the_load_on_arrival_is_what_ran_and_what_waited(bench: Bench) -> None:
    first, second, third = (FakeRequest(name) for name in "abc")
    bench.arrive(first)
    bench.table.scheduled(["a"], 7)
    bench.arrive(second)
    state = bench.arrive(third)
    assert (state.running, state.waiting) == (7, 1)


def test_the_table_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guard.hook.table.REQUESTS_LIMIT", 3)
    for number in range(5):
        bench.arrive(FakeRequest(str(number)))
    assert len(bench.table) == 3
    assert bench.table.get("0") is None
    assert bench.arrive(FakeRequest("x")).waiting == 3
