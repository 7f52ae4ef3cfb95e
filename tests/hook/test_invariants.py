"""The hook's invariants (docs/architecture.md) that no other file tests by name, without vLLM.

`test_connector_invariants.py` has most of 1 to 5, 9 and 10; what needs a real engine (7 above all) is in tests/lab.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from guard import semconv
from guard.hook import plugin
from guard.hook.envelope import ENVELOPE, Envelope, SyncLoads
from guard.hook.records import Scope
from guard.hook.table import RequestTable
from guard.pace import PERMIT_NS
from guard.wire import Reads
from tests.hook.fake_runtime import ENGINE, OFF, FakeRuntime, arrive, new
from tests.hook.fakes_vllm import (
    SCHEDULER,
    WORKER,
    FakeBlocks,
    FakeConnector,
    FakeRequest,
    FakeStatus,
    MooncakeStoreConnector,
    NixlConnector,
    output,
    step,
    vllm_config,
)


def test_invariant_2_an_admitted_load_reaches_vllm_as_the_connector_made_it(process: FakeRuntime) -> None:
    """The worker's results, the metadata and the answers are the inner connector's own objects."""
    scheduler, worker = new(), new(role=WORKER)
    request = arrive(process, scheduler)
    scheduler.match = (2048, True)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (2048, True)
    scheduler.update_state_after_alloc(request, FakeBlocks(1), 2048)
    worker._connector_metadata = scheduler.build_connector_meta(step())
    worker.start_load_kv(SimpleNamespace())
    assert worker.get_finished({"a"}) == (None, {"a"})
    report = output(finished={request.request_id}, blocks={7})
    before = dict(vars(report))
    scheduler.update_connector_output(report)
    assert vars(report) == before
    assert scheduler.request_finished(request, []) == (True, None)


def test_invariant_3_a_declined_request_stays_declined_through_preemption_and_failure_of_others(
    process: FakeRuntime,
) -> None:
    connector = new()
    process.directive = OFF
    request = arrive(process, connector)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    process.directive = None  # not even the end of the lease brings it back
    for status in ("WAITING", "PREEMPTED"):
        request.status = FakeStatus(status)
        assert connector.get_num_new_matched_tokens(request, 16) == (0, False)


WORKER_CALLS: dict[str, Callable[[Any], Any]] = {
    "start_load_kv": lambda c: c.start_load_kv(SimpleNamespace()),
    "wait_for_save": lambda c: c.wait_for_save(),
    "get_finished": lambda c: c.get_finished({"a"}),
    "build_connector_worker_meta": lambda c: c.build_connector_worker_meta(),
}


@pytest.mark.parametrize("name", WORKER_CALLS)
def test_invariant_5_nothing_of_ours_raises_in_a_worker(process: FakeRuntime, name: str) -> None:
    class Broken:
        def __getattr__(self, attribute: str) -> Any:
            raise RuntimeError(attribute)

    worker = new(role=WORKER)
    worker._kvguard_worker = worker._kvguard_adapter = Broken()
    for plain in (((("r1", 1, True, 2, 3),), (("r1", 7, 1, 512, True),), 5), "of another version", 3):
        worker.calls.clear()
        worker._connector_metadata = SimpleNamespace(**{ENVELOPE: plain})
        WORKER_CALLS[name](worker)
        assert worker.calls == [name]


def test_invariant_5_past_the_limit_a_worker_records_nothing_and_still_answers_as_its_step_asks(
    process: FakeRuntime,
) -> None:
    worker = new(role=WORKER)
    worker._connector_metadata = SimpleNamespace(**{ENVELOPE: ((("r", 1, True, 2, 3),), (("r", 7, 1, 512, False),), 5)})
    process.failsafe.tripped = True
    worker.start_load_kv(SimpleNamespace())
    wrapped = worker.build_connector_worker_meta()
    assert isinstance(wrapped, SyncLoads)  # every rank must answer alike
    assert len(process.recorder) == 0


def test_invariant_5_an_output_without_worker_metadata_passes(process: FakeRuntime) -> None:
    class Older(FakeConnector):
        def update_connector_output(self, connector_output: Any) -> None:
            self.calls.append("update_connector_output")

    connector = new(Older)
    connector.update_connector_output(SimpleNamespace(finished_recving=None, finished_sending=None))
    assert connector.calls == ["update_connector_output"]
    assert process.failsafe.errors == 0


def test_invariant_5_an_adapter_that_fails_costs_neither_stores_nor_times(process: FakeRuntime) -> None:
    connector = new()
    process.directive = replace(OFF, stores=False)
    adapter = connector._kvguard_scheduler.adapter
    for name in ("stop_stores", "resume_stores", "meta_built"):
        setattr(adapter, name, lambda *_, **__: 1 / 0)
    request = arrive(process, connector)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), 0)
    connector.build_connector_meta(step(request))
    request.num_output_tokens = 1
    connector.get_kv_connector_stats()
    assert semconv.TTFT in process.spans()[0].attributes
    assert process.failsafe.errors == 3


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), GeneratorExit()])
def test_invariant_5_register_never_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(env: Any) -> bool:
        raise error

    monkeypatch.setattr(plugin, "install", fail)
    plugin.register()


@pytest.mark.parametrize("match", [(2048, True), (2048, False), (0, False), (None, True)])
def test_invariant_7_the_inner_connector_sees_the_same_calls_as_unhooked(
    process: FakeRuntime, match: tuple[int | None, bool]
) -> None:
    """The remote road: same calls, same answers. Same output on a real engine is a lab test."""
    answers = []
    for connector in (FakeConnector(vllm_config(), SCHEDULER, None), new()):
        connector.match = match
        request = FakeRequest()
        said: list[Any] = [connector.on_new_request(request), connector.get_num_new_matched_tokens(request, 0)]
        tokens = match[0] or 0
        said.append(connector.update_state_after_alloc(request, FakeBlocks(1), tokens))
        said.append(type(connector.build_connector_meta(step(request))))
        connector.update_connector_output(output(finished={request.request_id} if match[1] else None))
        said += [connector.get_kv_connector_stats(), connector.request_finished(request, []), list(connector.calls)]
        answers.append(said)
    assert answers[0] == answers[1]
    assert process.failsafe.errors == 0


def test_invariant_9_a_hand_off_sibling_does_not_keep_hits_from_being_refused(process: FakeRuntime) -> None:
    """MultiConnector[Nixl, store]: what the store matches for a plain request is a hit like any other."""
    nixl, store = new(NixlConnector), new()
    process.directive = OFF
    nixl.match = (0, False)
    plain = arrive(process, nixl, store)
    assert nixl.get_num_new_matched_tokens(plain, 0) == (0, False)
    assert store.get_num_new_matched_tokens(plain, 0) == (0, False)
    for connector in (nixl, store):
        connector.update_state_after_alloc(plain, FakeBlocks(1), 0)
        connector.build_connector_meta(step(plain))
    plain.num_output_tokens = 1
    store.get_kv_connector_stats()
    root = next(span for span in process.spans() if span.name == semconv.SPAN_REQUEST)
    assert root.attributes[semconv.DECISION] == "decline"
    assert semconv.HANDOFF not in root.attributes
    handed = arrive(process, nixl, store, request_id="handed", kv_transfer_params={"do_remote_prefill": True})
    nixl.match = (2048, True)
    assert nixl.get_num_new_matched_tokens(handed, 0) == (2048, True)
    assert store.get_num_new_matched_tokens(handed, 0) == (2048, True)


def test_invariant_10_request_ids_can_be_turned_off(process: FakeRuntime) -> None:
    process.scope = Scope(ENGINE, "tiny", request_ids=False, salt=b"salt")
    process.table = RequestTable(process.recorder, process.scope, clock=process.clock, wall=process.clock.wall)
    scheduler, worker = new(), new(role=WORKER)
    request = arrive(process, scheduler, request_id="cmpl-secret-0123abcd")
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks(1), 2048)
    worker._connector_metadata = scheduler.build_connector_meta(step())
    worker.start_load_kv(SimpleNamespace())
    worker._kvguard_worker.finished({request.request_id}, ())
    scheduler.update_connector_output(output(finished={request.request_id}))
    scheduler.build_connector_meta(step(request))
    request.num_output_tokens = 2
    scheduler.get_kv_connector_stats()
    scheduler.request_finished(request, [])
    spans = process.spans()
    assert {span.name for span in spans} == {
        semconv.SPAN_REQUEST, semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_LOAD, semconv.SPAN_DECODE,
    }  # fmt: skip
    assert "secret" not in str(spans)
    assert len({span.attributes[semconv.INTERNAL_ID] for span in spans}) == 1


def test_invariant_aborted_requests_have_no_ttft_and_live_until_their_load_has_ended(process: FakeRuntime) -> None:
    connector = new()
    request = arrive(process, connector)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
    connector.request_finished(request, [])
    spans = {span.name: span for span in process.spans()}
    assert spans[semconv.SPAN_REQUEST].attributes[semconv.ABORTED] is True
    assert semconv.TTFT not in spans[semconv.SPAN_REQUEST].attributes
    assert semconv.SPAN_FETCH not in spans
    process.clock.tick(500)
    connector.update_connector_output(output(finished={request.request_id}))
    (fetch,) = process.spans()
    assert fetch.seconds == pytest.approx(0.5)
    assert fetch.parent_id == spans[semconv.SPAN_REQUEST].span_id


def test_invariant_permits_age_out(process: FakeRuntime) -> None:
    connector = new()
    process.directive = replace(OFF, mode=semconv.MODE_AUTO, reads=Reads(max_inflight=1))
    lost = arrive(process, connector)
    connector.get_num_new_matched_tokens(lost, 0)
    connector.update_state_after_alloc(lost, FakeBlocks(1), 2048)
    refused = arrive(process, connector, request_id="refused")
    assert connector.get_num_new_matched_tokens(refused, 0) == (0, False)
    process.clock.now += PERMIT_NS + 1
    later = arrive(process, connector, request_id="later")
    assert connector.get_num_new_matched_tokens(later, 0) == (2048, True)


def test_invariant_the_slowest_rank_counts() -> None:
    ranks = [SyncLoads(None, 5, 100, end, "boot") for end in (130, 190, 150)]
    merged = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert (merged.batch, merged.end - merged.start) == (5, 90)


def test_invariant_wall_clock_steps_make_no_negative_times(process: FakeRuntime) -> None:
    connector = new()
    request = arrive(process, connector)
    process.clock.offset -= 3600 * 10**9  # an hour back
    connector = new()
    other = FakeRequest("b", arrival_time=process.clock.wall_seconds() + 3600)
    for one in (request, other):
        connector.on_new_request(one)
        connector.get_num_new_matched_tokens(one, 0)
        connector.update_state_after_alloc(one, FakeBlocks(1), 0)
        process.clock.tick(5)
        process.clock.offset -= 60 * 10**9
        connector.build_connector_meta(step(one))
        one.num_output_tokens = 1
        connector.get_kv_connector_stats()
    roots = [span for span in process.spans() if span.name == semconv.SPAN_REQUEST]
    assert len(roots) == 2
    for root in roots:
        assert root.seconds >= 0.0
        assert min(root.attributes[name] for name in (*semconv.TIME_PARTS, semconv.TTFT)) >= 0.0


def test_invariant_directives_are_read_on_the_scheduler_side_only(process: FakeRuntime) -> None:
    """A worker's connector neither joins as a scheduler nor asks for what is in force."""
    asked: list[str] = []
    process.current = asked.append  # type: ignore[method-assign, assignment]
    worker = new(MooncakeStoreConnector, WORKER)
    for call in WORKER_CALLS.values():
        call(worker)
    assert worker._kvguard_scheduler is None
    assert asked == []
    assert Envelope.read(None) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "kvguard-directives"]
