"""The guarded connector around a fake one: what it tells, stops and leaves alone, without vLLM."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from guard import semconv
from guard.hook import attach
from guard.hook import connector as module
from guard.hook.connector import guarded
from guard.hook.envelope import ENVELOPE, Envelope, SyncLoads
from tests.hook.fake_runtime import AUTO, METHODS, OFF, FakeRuntime, Make, decision, serve
from tests.hook.fakes_vllm import (
    SCHEDULER,
    WORKER,
    FakeBlocks,
    FakeConnector,
    FakeRequest,
    MooncakeStoreConnector,
    output,
    step,
    vllm_config,
)


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


def test_a_prefill_instance_is_switched_like_any_other(make: Make, runtime: FakeRuntime) -> None:
    runtime.directive = OFF
    span = serve(make(FakeConnector), FakeRequest(kv_transfer_params={"do_remote_decode": True}), runtime)
    assert decision(span)[1] == "off"


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
    monkeypatch.setattr(attach, "runtime_for", lambda config: None)
    connector = guarded(FakeConnector)(vllm_config(), SCHEDULER, None)
    for name, call in METHODS.items():
        connector.calls.clear()
        call(connector)
        assert connector.calls == [name]
