"""The guarded connector around a fake one: design invariants, by name, without vLLM."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from guard import semconv
from guard.hook import connector as module
from guard.hook.connector import guarded
from guard.hook.failsafe import Failsafe
from guard.hook.recorder import Recorder
from guard.hook.requests import Scope
from guard.hook.table import RequestTable
from guard.hook.worker import ENVELOPE, Contexts, Envelope, SyncLoads
from guard.wire import Directive, Reads, Span
from tests.hook.fakes_vllm import (
    SCHEDULER,
    WORKER,
    Clock,
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

OFF = Directive(id="d1", engine_id="h:1/0", backend="x", mode=semconv.MODE_OFF)
AUTO = replace(OFF, mode=semconv.MODE_AUTO)


class FakeRuntime:
    """The runtime's interface without threads or network."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine_id = "h:1/0"
        self.failsafe = Failsafe(limit=3)
        self.recorder = Recorder()
        self.scope = Scope(self.engine_id, "tiny")
        self.table = RequestTable(self.recorder, self.scope, clock=self.clock, wall=self.clock.wall)
        self.contexts = Contexts()
        self.boot = "boot"
        self.rank = 0
        self.directive: Directive | None = None
        self.joined = 0

    def current(self, backend: str) -> Directive | None:
        return self.directive

    def join(self, backend: Any, *, scheduler: bool) -> int:
        self.joined += 1
        return self.joined

    def leave(self) -> None:
        self.joined -= 1

    def spans(self) -> list[Span]:
        return [span for record in self.recorder.drain(1000) for span in record.spans()]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime()
    monkeypatch.setattr(module, "runtime_for", lambda config: made)
    return made


Make = Callable[..., Any]


@pytest.fixture
def make(runtime: FakeRuntime) -> Iterator[Make]:
    def new(inner: type = FakeConnector, role: Any = SCHEDULER, **transfer: Any) -> Any:
        return guarded(inner)(vllm_config(**transfer), role, None)

    return new


def serve(connector: Any, request: FakeRequest, runtime: FakeRuntime) -> Span:
    """One request through the scheduler's calls, as vLLM makes them; returns its request span."""
    request.arrival_time = runtime.clock.wall_seconds()
    connector.on_new_request(request)
    tokens, asynchronous = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1, 2), tokens)
    if tokens and asynchronous:
        connector.build_connector_meta(step())
        runtime.clock.tick(10)
        connector.update_connector_output(output(finished={request.request_id}))
        connector.update_state_after_alloc(request, FakeBlocks(1, 2), 0)
    connector.build_connector_meta(step(request))
    runtime.clock.tick(20)
    request.num_output_tokens = 1
    connector.get_kv_connector_stats()
    return next(span for span in runtime.spans() if span.name == semconv.SPAN_REQUEST)


def decision(span: Span) -> tuple[Any, Any]:
    return span.attributes[semconv.DECISION], span.attributes[semconv.DECISION_REASON]


def test_the_guarded_class_keeps_the_inner_ones_identity() -> None:
    cls = guarded(FakeConnector)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (
        FakeConnector.__name__,
        FakeConnector.__qualname__,
        FakeConnector.__module__,
    )
    assert issubclass(cls, FakeConnector)
    assert guarded(cls) is cls
    assert not hasattr(cls, "request_finished_all_groups")
    assert not hasattr(cls, "get_transfer_results")


def test_results_are_taken_from_the_method_that_this_vllm_calls() -> None:
    old = type("KVConnectorBase_V1", (), {"get_finished": FakeConnector.get_finished})
    newer_connector = type("Theirs", (FakeConnector, old), {"get_transfer_results": lambda self, ids: None})
    assert "get_finished" in vars(guarded(newer_connector))
    assert "get_transfer_results" not in vars(guarded(newer_connector))
    new = type("KVConnectorBase_V1", (), {"get_transfer_results": lambda self, ids: None})
    assert "get_transfer_results" in vars(guarded(type("Theirs", (FakeConnector, new), {})))


def test_invariant_1_fail_open(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = None
    connector = make(MooncakeStoreConnector)
    assert decision(serve(connector, FakeRequest(), runtime)) == ("remote", "no-directive")
    # not even the memory of a failed load acts
    request = FakeRequest("b")
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
    connector.update_connector_output(output(finished={"b"}, failed={"b"}))
    assert connector.get_num_new_matched_tokens(request, 0) == (2048, True)


def test_invariant_2_decline_by_not_matching(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = OFF
    connector = make(FakeConnector)
    span = serve(connector, FakeRequest(), runtime)
    assert decision(span) == ("decline", "off")
    assert "get_num_new_matched_tokens" in connector.calls
    assert "update_state_after_alloc 0" in connector.calls
    assert span.attributes[semconv.TOKENS_MATCHED] == 2048
    assert span.attributes[semconv.TOKENS_LOADED] == 0


def test_invariant_2_skip_does_not_ask(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = OFF
    connector = make(MooncakeStoreConnector)
    assert decision(serve(connector, FakeRequest(), runtime)) == ("skip", "off")
    assert "get_num_new_matched_tokens" not in connector.calls


def test_invariant_2_nothing_is_touched_once_the_request_waits_for_remote_kv(make: Make, runtime: FakeRuntime) -> None:
    connector = make(FakeConnector)
    request = FakeRequest()
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
    before = list(connector.calls)
    runtime.directive = OFF
    connector.build_connector_meta(step())
    report = output(finished={request.request_id})
    connector.update_connector_output(report)
    assert report.finished_recving == {request.request_id}
    assert connector.calls[len(before) :] == ["build_connector_meta", "update_connector_output"]


def test_invariant_3_one_decision_per_request(make: Make, runtime: FakeRuntime) -> None:
    connector = make(FakeConnector)
    request = FakeRequest()
    runtime.directive = OFF
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    runtime.directive = replace(OFF, mode=semconv.MODE_ON)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)  # polled again: kept
    request.status = FakeStatus("PREEMPTED")
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)  # preempted: kept
    other = FakeRequest("other")
    connector.on_new_request(other)
    assert connector.get_num_new_matched_tokens(other, 0) == (2048, True)
    runtime.directive = OFF
    assert connector.get_num_new_matched_tokens(other, 0) == (2048, True)  # admitted: kept


def test_invariant_3_remote_may_become_recompute_before_the_match_is_known(make: Make, runtime: FakeRuntime) -> None:
    connector = make(FakeConnector)
    request = FakeRequest()
    runtime.directive = AUTO
    connector.on_new_request(request)
    connector.match = (None, True)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    runtime.directive = OFF
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)  # the lookup under way is not cut
    connector.match = (2048, True)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(("inner", "asked"), [(FakeConnector, 2), (MooncakeStoreConnector, 1)])
def test_invariant_3_a_failed_load_is_not_matched_again(
    make: Make, runtime: FakeRuntime, inner: type, asked: int
) -> None:
    runtime.directive = AUTO
    connector = make(inner)
    request = FakeRequest(arrival_time=runtime.clock.wall_seconds())
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (2048, True)
    connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
    connector.update_connector_output(output(finished={request.request_id}, failed={request.request_id}))
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.calls.count("get_num_new_matched_tokens") == asked
    connector.update_state_after_alloc(request, FakeBlocks(1), 0)
    connector.build_connector_meta(step(request))
    request.num_output_tokens = 1
    connector.get_kv_connector_stats()
    spans = runtime.spans()
    assert decision(spans[0])[1] == "load-failed"
    fetches = [span for span in spans if span.name == semconv.SPAN_FETCH]
    assert [span.attributes[semconv.OUTCOME] for span in fetches] == ["failed"]
    assert spans[0].attributes[semconv.TOKENS_MATCHED] == 2048
    assert spans[0].attributes[semconv.TOKENS_LOADED] == 0


def test_invariant_4_no_partial_counts(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = replace(AUTO, reads=Reads(min_tokens=1000, max_inflight=1, max_inflight_bytes=1))
    connector = make(FakeConnector)
    for number, matched in enumerate((1, 999, 1000, 2048, 4000)):
        connector.match = (matched, True)
        request = FakeRequest(str(number))
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0)[0] in (0, matched)


METHODS = {
    "on_new_request": lambda c: c.on_new_request(FakeRequest("z")),
    "get_num_new_matched_tokens": lambda c: c.get_num_new_matched_tokens(FakeRequest("z"), 0),
    "update_state_after_alloc 5": lambda c: c.update_state_after_alloc(FakeRequest("z"), FakeBlocks(1), 5),
    "build_connector_meta": lambda c: c.build_connector_meta(step(FakeRequest("z"))),
    "update_connector_output": lambda c: c.update_connector_output(output(finished={"z"})),
    "get_kv_connector_stats": lambda c: c.get_kv_connector_stats(),
    "request_finished": lambda c: c.request_finished(FakeRequest("z"), []),
    "shutdown": lambda c: c.shutdown(),
}


@pytest.mark.parametrize("name", METHODS)
def test_invariant_5_nothing_of_ours_raises(make: Make, runtime: FakeRuntime, name: str) -> None:
    connector = make(FakeConnector)

    class Broken:
        def __getattr__(self, attribute: str) -> Any:
            raise RuntimeError(attribute)

    connector._kvguard_scheduler = Broken()
    connector._kvguard_leave = Broken().__getattr__ if name == "shutdown" else None
    METHODS[name](connector)
    assert connector.calls == [name]
    assert runtime.failsafe.errors >= 1


@pytest.mark.parametrize("name", METHODS)
def test_invariant_5_the_inner_connectors_exceptions_pass_untouched(
    make: Make, runtime: FakeRuntime, name: str
) -> None:
    connector = make(FakeConnector)
    connector.raises = KeyError("inner")
    with pytest.raises(KeyError) as caught:
        METHODS[name](connector)
    assert caught.value is connector.raises
    assert runtime.failsafe.errors == 0


def test_invariant_5_after_some_errors_every_call_passes_through(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = OFF
    connector = make(MooncakeStoreConnector)
    request = FakeRequest()
    for _ in range(3):
        runtime.failsafe.record("test", ValueError("x"))
    assert runtime.failsafe.tripped
    assert connector.get_num_new_matched_tokens(request, 0) == (2048, True)
    wrapped = output(meta=SyncLoads("theirs", 1, 0, 1, "boot"))
    connector.update_connector_output(wrapped)
    assert connector.seen_meta == "theirs"  # still unwrapped
    assert runtime.spans() == []


def test_invariant_5_a_connector_of_which_our_part_fails_to_start_works_unguarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(config: Any) -> None:
        raise OSError("no runtime")

    monkeypatch.setattr(module, "runtime_for", fail)
    connector = guarded(MooncakeStoreConnector)(vllm_config(), SCHEDULER, None)
    assert connector.get_num_new_matched_tokens(FakeRequest(), 0) == (2048, True)


def test_invariant_6_no_thread_starts_before_a_connector_is_made() -> None:
    before = threading.active_count()
    guarded(type("Another", (FakeConnector,), {}))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("inner", "transfer", "params"),
    [
        (FakeConnector, {}, {"do_remote_prefill": True}),
        (MooncakeStoreConnector, {"kv_role": "kv_consumer"}, None),
        (MooncakeStoreConnector, {"kv_role": "kv_producer"}, None),
        (NixlConnector, {}, None),
    ],
)
def test_invariant_9_a_hand_off_is_not_a_hit(
    make: Make, runtime: FakeRuntime, inner: type, transfer: dict[str, str], params: dict[str, bool] | None
) -> None:
    runtime.directive = OFF
    span = serve(make(inner, **transfer), FakeRequest(kv_transfer_params=params), runtime)
    assert decision(span) == ("remote", "handoff")
    assert span.attributes[semconv.HANDOFF] is True


def test_a_prefill_instance_is_switched_like_any_other(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = OFF
    span = serve(make(FakeConnector), FakeRequest(kv_transfer_params={"do_remote_decode": True}), runtime)
    assert decision(span)[1] == "off"


def test_invariant_10_no_prompt_content_leaves(make: Make, runtime: FakeRuntime) -> None:
    request = FakeRequest(block_hashes=[b"SECRET"])
    request.prompt_token_ids = [4242424242]  # type: ignore[attr-defined]
    connector = make(FakeConnector)
    serve(connector, request, runtime)
    connector.request_finished(request, [])
    serve(connector, FakeRequest("b", block_hashes=[b"SECRET"]), runtime)
    meta = connector.build_connector_meta(step(FakeRequest("b")))
    for span in runtime.spans():
        assert "SECRET" not in str(span.attributes)
        assert "4242424242" not in str(span.attributes)
    assert "SECRET" not in str(getattr(meta, ENVELOPE, ""))


def test_prompt_logprobs_are_not_looked_up_since_vllm_would_drop_the_match(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = AUTO
    connector = make(MooncakeStoreConnector)
    assert decision(serve(connector, FakeRequest(skip_reading_prefix_cache=True), runtime)) == ("skip", "unusable")
    runtime.directive = None
    request = FakeRequest("b", skip_reading_prefix_cache=True)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (2048, True)


def test_two_children_of_a_multi_connector_tell_one_request_and_the_other_tier(
    make: Make, runtime: FakeRuntime
) -> None:
    first = make(MooncakeStoreConnector)
    second = make(FakeConnector)
    second.match = (512, False)
    current = {"mooncake-store": OFF}
    first._kvguard_scheduler._current = second._kvguard_scheduler._current = current.get
    request = FakeRequest(arrival_time=runtime.clock.wall_seconds())
    for child in (first, second):
        child.on_new_request(request)
    assert first.get_num_new_matched_tokens(request, 0) == (0, False)
    assert second.get_num_new_matched_tokens(request, 0) == (512, False)
    first.update_state_after_alloc(request, FakeBlocks(1), 0)
    second.update_state_after_alloc(request, FakeBlocks(1), 512)
    envelopes = [
        Envelope.read(getattr(child.build_connector_meta(step(request)), ENVELOPE)) for child in (first, second)
    ]
    assert envelopes[0]
    assert envelopes[1]
    assert (len(envelopes[0].loads), len(envelopes[1].loads)) == (0, 1)
    assert (bool(envelopes[0].batch), bool(envelopes[1].batch)) == (False, True)
    request.num_output_tokens = 1
    for child in (first, second):
        child.get_kv_connector_stats()
    for child in (first, second):
        child.request_finished(request, [])
    spans = runtime.spans()
    names = [span.name for span in spans]
    assert names.count(semconv.SPAN_REQUEST) == 1
    assert names.count(semconv.SPAN_FETCH) == 1
    assert names.count(semconv.SPAN_DECODE) == 1
    assert decision(spans[0]) == ("other-tier", "off")
    assert spans[0].attributes[semconv.BACKEND] == "mooncake-store"


def test_a_synchronous_load_is_timed_in_the_worker_and_not_hidden_in_prefill(
    make: Make, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(FakeConnector)
    worker = make(FakeConnector, WORKER)
    monkeypatch.setattr(module.time, "monotonic_ns", runtime.clock)
    scheduler.match = (512, False)
    request = FakeRequest(arrival_time=runtime.clock.wall_seconds())
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks(1), 512)
    worker._connector_metadata = scheduler.build_connector_meta(step(request))
    monkeypatch.setattr(FakeConnector, "start_load_kv", lambda self, context: runtime.clock.tick(30))
    worker.start_load_kv(SimpleNamespace())
    worker.worker_meta = "theirs"
    wrapped = worker.build_connector_worker_meta()
    assert isinstance(wrapped, SyncLoads)
    assert worker.build_connector_worker_meta() == "theirs"  # only on steps with synchronous loads
    runtime.clock.tick(50)  # the forward pass
    scheduler.update_connector_output(output(meta=wrapped))
    assert scheduler.seen_meta == "theirs"
    request.num_output_tokens = 1
    scheduler.get_kv_connector_stats()
    spans = {span.name: span for span in runtime.spans()}
    times = spans[semconv.SPAN_REQUEST].attributes
    assert times[semconv.TIME_FETCH] == pytest.approx(0.030)
    assert times[semconv.TIME_PREFILL] == pytest.approx(0.050)
    load = spans[semconv.SPAN_LOAD]
    fetch = spans[semconv.SPAN_FETCH]
    assert load.seconds == pytest.approx(0.030)
    assert load.parent_id == fetch.span_id
    assert load.attributes[semconv.BATCH] == fetch.attributes[semconv.BATCH]
    assert load.attributes[semconv.RANK] == 0


def test_each_rank_tells_its_share_of_an_asynchronous_load(
    make: Make, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(FakeConnector)
    worker = make(FakeConnector, WORKER)
    monkeypatch.setattr(module.time, "monotonic_ns", runtime.clock)
    request = FakeRequest()
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks(1), 2048)
    worker._connector_metadata = scheduler.build_connector_meta(step())
    worker.start_load_kv(SimpleNamespace())
    assert worker.build_connector_worker_meta() is None
    runtime.clock.tick(25)
    worker.get_finished({request.request_id})
    worker.get_finished({request.request_id})
    (load,) = runtime.spans()
    assert load.seconds == pytest.approx(0.025)
    assert load.attributes[semconv.TOKENS] == 2048
    assert load.attributes[semconv.OUTCOME] == "ok"
    worker._kvguard_adapter.failed_loads = lambda: {request.request_id}
    worker.start_load_kv(SimpleNamespace())
    worker.get_finished({request.request_id})
    assert [span.attributes[semconv.OUTCOME] for span in runtime.spans()] == ["failed"]


def test_stores_are_stopped_only_while_the_metadata_is_built(make: Make, runtime: FakeRuntime) -> None:
    connector = make(FakeConnector)
    seen: list[str] = []
    adapter = connector._kvguard_scheduler.adapter
    adapter.stop_stores = lambda: seen.append("stop")
    adapter.resume_stores = lambda: seen.append("resume")
    connector.build_connector_meta(step())
    assert seen == []
    runtime.directive = replace(AUTO, stores=False)
    connector.build_connector_meta(step())
    assert seen == ["stop", "resume"]
    connector.raises = ValueError("inner")
    with pytest.raises(ValueError, match="inner"):
        connector.build_connector_meta(step())
    assert seen == ["stop", "resume"] * 2
    connector.raises = None
    runtime.directive = replace(AUTO, mode=semconv.MODE_OBSERVE, stores=False)
    connector.build_connector_meta(step())
    assert len(seen) == 4


def test_a_skipped_lookup_took_no_time_and_has_no_span(make: Make, runtime: FakeRuntime) -> None:
    """Else the service would wait for its span and count a lookup of microseconds."""
    runtime.directive = OFF
    connector = make(MooncakeStoreConnector)
    skip = connector._kvguard_scheduler.adapter.skip
    connector._kvguard_scheduler.adapter.skip = lambda *args: runtime.clock.tick(0.02) or skip(*args)
    span = serve(connector, FakeRequest(), runtime)
    assert span.attributes[semconv.TIME_LOOKUP] == 0.0
    assert sum(span.attributes[name] for name in semconv.TIME_PARTS) == pytest.approx(span.attributes[semconv.TTFT])


def test_eager_lookups_are_skipped_where_they_start(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = OFF
    connector = make(MooncakeStoreConnector)
    connector._kvguard_scheduler.adapter.lookup_starts_early = lambda request: True
    request = FakeRequest()
    connector.on_new_request(request)
    assert connector.calls == []
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_the_hook_switched_off_leaves_a_plain_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "runtime_for", lambda config: None)
    connector = guarded(FakeConnector)(vllm_config(), SCHEDULER, None)
    for name, call in METHODS.items():
        connector.calls.clear()
        call(connector)
        assert connector.calls == [name]
