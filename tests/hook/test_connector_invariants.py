"""The guarded connector around a fake one: design invariants, by name, without vLLM."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from guard import semconv
from guard.hook import attach
from guard.hook.connector import guarded
from guard.hook.envelope import ENVELOPE, SyncLoads
from guard.wire import Reads
from tests.hook.fake_runtime import AUTO, METHODS, OFF, FakeRuntime, Make, decision, serve
from tests.hook.fakes_vllm import (
    SCHEDULER,
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

    monkeypatch.setattr(attach, "runtime_for", fail)
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
