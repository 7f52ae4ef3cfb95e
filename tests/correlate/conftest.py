"""Spans as the hook, vLLM and LMCache send them, for one request or many."""

import pytest

from guard import semconv as s
from guard.wire import Span

T0 = 1_790_000_000 * 10**9
SECOND = 10**9


class Spans:
    """Makes the spans of requests; `one` gives a whole request."""

    def __init__(self):
        self.ids = 0

    def span(self, name, parent="", start=0.0, seconds=0.01, error=False, trace="a" * 32, **attributes):
        self.ids += 1
        begin = T0 + round(start * 1e9)
        end = begin + round(seconds * 1e9)
        return Span(name, trace, f"{self.ids:016x}", parent, begin, end, attributes, 3, error)

    def request(self, number=1, start=0.0, internal=None, **more):
        external = f"cmpl-{number}"
        attributes = {
            s.REQUEST_ID: external, s.INTERNAL_ID: internal or f"{external}-{number:08x}", s.REQUEST_MODEL: "m",
            s.ENGINE_ID: "host:8000/0", s.BACKEND: "lmcache-mp/resp", s.INPUT_TOKENS: 2000, s.TOKENS_LOCAL: 256,
            s.TOKENS_MATCHED: 1024, s.TOKENS_LOADED: 1024, s.TOKENS_COMPUTED: 720, s.TTFT: 0.36, s.TIME_INTAKE: 0.01,
            s.TIME_QUEUE: 0.02, s.TIME_LOOKUP: 0.03, s.TIME_SLOT: 0.04, s.TIME_FETCH: 0.1, s.TIME_RESUME: 0.05,
            s.TIME_PREFILL: 0.1, s.EXPOSED_WAIT: 0.17, s.DECISION: "remote", s.DECISION_REASON: "on", s.RUNNING: 3,
            s.WAITING: 1, s.ABORTED: False, **more,
        }  # fmt: skip
        attributes = {key: value for key, value in attributes.items() if value is not None}
        return self.span(s.SPAN_REQUEST, start=start, seconds=0.36, **attributes)

    def one(self, number=1, start=0.0, *, attempts=1, ranks=2, reads=3, server=2, parents=True, **more):
        root = self.request(number, start, **more)
        ids = {s.REQUEST_ID: f"cmpl-{number}"}
        trace = {"trace": root.trace_id}
        lookup = self.span(s.SPAN_LOOKUP, root.span_id, start + 0.03, 0.03, **trace, **{s.POLLS: 4, s.ROUND_TRIPS: 15})
        spans = [root, lookup]
        for attempt in range(1, attempts + 1):
            outcome = {s.OUTCOME: "ok"} if attempt == attempts else {s.OUTCOME: "failed", s.ERROR_TYPE: "timeout"}
            fetch = self.span(
                s.SPAN_FETCH, root.span_id, start + 0.1 * attempt, 0.1, attempt < attempts,
                **{s.ATTEMPT: attempt, s.TOKENS: 1024, s.BYTES: 2 << 20, s.BLOCKS: 8, **outcome},
            )  # fmt: skip
            spans.append(fetch)
            spans += [
                self.span(s.SPAN_LOAD, fetch.span_id, start + 0.1, 0.08 + rank / 100, **{s.RANK: rank})
                for rank in range(ranks)
            ]
            spans += [
                self.span(s.SPAN_READ, fetch.span_id, start + 0.1, 0.0011 * (1 + index), **{s.BYTES: 1000 + index})
                for index in range(reads)
            ]
        spans.append(self.span(s.SPAN_STORE, root.span_id, start + 0.4, **{s.BYTES: 4096}))
        parent = root.span_id if parents else ""
        spans.append(self.span(s.SPAN_DECODE, parent, start + 0.36, 2.0, **ids, **{s.OUTPUT_TOKENS: 99, s.TPOT: 0.02}))
        latencies = {s.VLLM_TTFT: 0.365, s.VLLM_QUEUE: 0.2, s.VLLM_PREFILL: 0.1, s.VLLM_E2E: 2.4}
        spans.append(self.span(s.SPAN_VLLM_REQUEST, parent, start, 2.4, **ids, **latencies))
        session = {s.LMCACHE_SESSION_ID: root.attributes[s.INTERNAL_ID]}
        spans += [self.span("mp.retrieve", "f" * 16, start + 0.1 + index, **session) for index in range(server)]
        return spans


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture(scope="session")
def new_spans():
    """The class itself, for property tests that need fresh spans per example."""
    return Spans


@pytest.fixture(scope="session")
def t0():
    return T0
