"""The trace of a request as a tracing backend receives it, with a real OTLP collector in vLLM's and LMCache's path.

vLLM, LMCache server ── OTLP/gRPC ── rotel ── OTLP/HTTP ── kvguard ── forwarded ── sink
hook ───────────────────────────── OTLP/HTTP ──────────────┘
"""

import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from guard import semconv
from lab.client import Completion, prompt, traceparent
from lab.config import StackConfig
from lab.sink import Sink, SinkSpan
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
STATE = "vendor=abc,other=1"
EXPORT_SECONDS = 6.0
"""vLLM and LMCache export their own spans every 5 s."""


@pytest.fixture
def plain(stacks, forward: dict[str, str]) -> Stack:
    """vLLM without `--otlp-traces-endpoint`."""
    return stacks.get(StackConfig(eager_prefetch=True, command_proxy=True, service_env=forward))


@pytest.fixture
def collector(stacks, forward: dict[str, str]) -> Stack:
    """vLLM's default exporter (gRPC) and LMCache's to rotel, rotel to the service; the hook re-parents llm_request."""
    return stacks.get(StackConfig(otlp="rotel", hook_env={"KVGUARD_TRACE_PARENT": "on"}, service_env=forward))


def stored(stack: Stack, *seeds: int) -> list[str]:
    """Prompts of four chunks and a rest that are in the store and nowhere else."""
    texts = [prompt(4 * CHUNK + 60, seed) for seed in seeds]
    for text in texts:
        stack.client.complete(text, max_tokens=1)
    stack.drain()
    return texts


def request_span(spans: list[SinkSpan], done: Completion) -> SinkSpan:
    """The one `kvguard.request` of a request."""
    (found,) = [
        span
        for span in spans
        if span.name == semconv.SPAN_REQUEST and span.attributes[semconv.REQUEST_ID] == done.request_id
    ]
    return found


def children(spans: list[SinkSpan], parent: SinkSpan) -> Counter[str]:
    """Names of the spans that have this one as parent, in the same trace."""
    return Counter(s.name for s in spans if (s.trace_id, s.parent_id) == (parent.trace_id, parent.span_id))


def test_without_vllms_tracing_only_the_callers_tree_is_missing(
    plain: Stack, sink: Sink, figure: Callable[[str], None]
) -> None:
    (text,) = stored(plain, 8001)
    header, caller = traceparent()
    mark = sink.mark()

    done = plain.client.complete(text, headers={"traceparent": header})
    sink.settle()
    record = plain.service.request(done.request_id)
    spans = sink.spans(since=mark)
    request = request_span(spans, done)
    parts = sum(part["seconds"] for part in record["timeline"])
    figure(f"TTFT {record['ttft_seconds']:.4f} s, parts {parts:.4f} s, client {done.ttft:.4f} s")

    assert request.parent_id == ""
    assert request.trace_id == record["trace_id"] != caller  # vLLM drops the header without the flag
    assert children(spans, request) == Counter([semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_DECODE])
    assert not [span for span in spans if span.name == semconv.SPAN_VLLM_REQUEST]
    assert [part["part"] for part in record["timeline"]] == [
        "intake", "queue", "lookup", "slot", "fetch", "resume", "prefill",
    ]  # fmt: skip
    assert parts == pytest.approx(record["ttft_seconds"], rel=0.05)
    assert 0 < record["ttft_seconds"] <= done.ttft
    assert all(record["timeline"][index]["seconds"] > 0 for index in (0, 2, 4, 6))
    assert record["decision"] == "remote"
    assert record["tokens"]["remote_loaded"] == 4 * CHUNK
    assert record["lookup"]["round_trips"] == 8
    assert [(fetch["attempt"], fetch["outcome"], list(fetch["ranks"])) for fetch in record["fetches"]] == [
        (1, "ok", ["0"])
    ]
    assert record["tokens"]["output"] == 12
    assert set(record["vllm"].values()) == {None}


def test_by_default_the_caller_is_the_parent_of_both(mp: Stack, sink: Sink) -> None:
    (text,) = stored(mp, 8051)
    header, trace_id = traceparent()
    mark = sink.mark()

    done = mp.client.complete(text, headers={"traceparent": header, "tracestate": STATE})
    sink.settle(quiet=EXPORT_SECONDS, timeout=30)
    spans = [span for span in sink.spans(since=mark) if span.trace_id == trace_id]
    request = request_span(spans, done)
    (vllm,) = [span for span in spans if span.name == semconv.SPAN_VLLM_REQUEST]

    # kvguard's own span may not reach the backend that has vLLM's, so without the opt-in nothing depends on it.
    assert request.parent_id == vllm.parent_id == header.split("-")[2]
    assert vllm.trace_state == STATE
    assert mp.service.request(done.request_id)["vllm"]["ttft_seconds"] is not None


def test_the_tree_of_a_request(collector: Stack, sink: Sink, figure: Callable[[str], None]) -> None:
    (text,) = stored(collector, 8101)
    header, trace_id = traceparent()
    client_span = header.split("-")[2]
    mark = sink.mark()

    done = collector.client.complete(text, headers={"traceparent": header, "tracestate": STATE})
    sink.settle(quiet=EXPORT_SECONDS, timeout=30)
    spans = [span for span in sink.spans(since=mark) if span.trace_id == trace_id]
    request = request_span(spans, done)
    (fetch,) = [span for span in spans if span.name == semconv.SPAN_FETCH]
    (vllm,) = [span for span in spans if span.name == semconv.SPAN_VLLM_REQUEST]
    figure(", ".join(f"{s.name} {s.span_id[:4]} < {s.parent_id[:4]}" for s in spans) + f"; client {client_span[:4]}")

    assert request.parent_id == client_span
    assert children(spans, request) == Counter(
        [semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_DECODE, semconv.SPAN_VLLM_REQUEST]
    )
    assert children(spans, fetch) == Counter([semconv.SPAN_LOAD])
    assert vllm.trace_state == STATE
    assert vllm.attributes[semconv.REQUEST_ID] == done.request_id
    assert len(spans) == 6
    record = collector.service.request(done.request_id)
    assert record["trace_id"] == trace_id
    assert record["vllm"]["ttft_seconds"] == pytest.approx(vllm.attributes[semconv.VLLM_TTFT])
    assert collector.service.get(f"/v1/requests/{trace_id}")["requests"] == [record]


def test_trees_of_concurrent_requests_do_not_mix(collector: Stack, sink: Sink) -> None:
    texts = stored(collector, *range(8201, 8207)) + [prompt(2 * CHUNK + 60, 8300 + n) for n in range(6)]
    headers = [traceparent() for _ in texts]
    mark = sink.mark()

    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(
                lambda each: collector.client.complete(each[0], headers={"traceparent": each[1][0]}),
                zip(texts, headers, strict=True),
            )
        )
    sink.settle(quiet=EXPORT_SECONDS, timeout=40)
    spans = sink.spans(since=mark)

    for number, ((header, trace_id), done) in enumerate(zip(headers, answers, strict=True)):
        request = request_span(spans, done)
        assert (request.trace_id, request.parent_id) == (trace_id, header.split("-")[2])
        below = [semconv.SPAN_LOOKUP, semconv.SPAN_DECODE, semconv.SPAN_VLLM_REQUEST]
        below += [semconv.SPAN_FETCH] if number < 6 else [semconv.SPAN_STORE]
        assert children(spans, request) == Counter(below)


def test_a_caller_who_does_not_sample_is_obeyed(collector: Stack, sink: Sink) -> None:
    (text,) = stored(collector, 8401)
    trace_id = secrets.token_hex(16)
    mark = sink.mark()

    done = collector.client.complete(text, headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-00"})
    record = collector.service.request(done.request_id)
    sink.settle(quiet=EXPORT_SECONDS, timeout=30)

    assert record["trace_id"] == trace_id
    assert record["fetches"][0]["outcome"] == "ok"  # kvguard knows the request all the same
    assert [span.name for span in sink.spans(since=mark) if span.trace_id == trace_id] == []


def test_without_a_caller_each_has_its_own_trace_and_they_are_joined(collector: Stack, sink: Sink) -> None:
    (text,) = stored(collector, 8501)
    mark = sink.mark()

    done = collector.client.complete(text)
    sink.settle(quiet=EXPORT_SECONDS, timeout=30)
    spans = sink.spans(since=mark)
    request = request_span(spans, done)
    (vllm,) = sink.spans(semconv.SPAN_VLLM_REQUEST, since=mark, gen_ai__request__id=done.request_id)
    record = collector.service.request(done.request_id)

    assert request.parent_id == vllm.parent_id == ""
    assert request.trace_id != vllm.trace_id
    assert children(spans, request) == Counter([semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_DECODE])
    assert record["vllm"]["ttft_seconds"] == pytest.approx(vllm.attributes[semconv.VLLM_TTFT])


def test_lmcaches_own_spans_are_joined(collector: Stack, sink: Sink, figure: Callable[[str], None]) -> None:
    (text,) = stored(collector, 8601)
    collector.injector.rtt(10_000)
    mark = sink.mark()

    done = collector.client.complete(text)
    sink.settle(quiet=EXPORT_SECONDS, timeout=30)
    record = collector.service.request(done.request_id)
    told = [
        span.name
        for span in sink.spans(since=mark, session_id=record["internal_id"])
        if span.name.startswith(semconv.LMCACHE_SPAN_PREFIX)
    ]
    (lookup,) = [span for span in record["server_spans"] if span["name"] == "mp.lookup_prefetch"]
    (u,) = [part for part in record["timeline"] if part["part"] == "lookup"]
    figure(f"mp.lookup_prefetch {lookup['seconds']:.3f} s inside a lookup of {u['seconds']:.3f} s (8 x 10 ms RTT)")

    assert Counter(told) == Counter(span["name"] for span in record["server_spans"])
    assert 0.08 <= lookup["seconds"] <= u["seconds"]
    assert u["start_seconds"] <= lookup["start_seconds"] + 0.005
    assert lookup["start_seconds"] + lookup["seconds"] <= u["start_seconds"] + u["seconds"] + 0.005
