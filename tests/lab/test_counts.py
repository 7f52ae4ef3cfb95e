"""Counts of the hook against counts of others: Redis's command statistics, vLLM's own counters, the client.

Distinct prompts and an empty L1 of LMCache's server, so that every lookup and every load is the store's business.
"""

import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from guard import semconv
from lab.client import Completion, prompt
from lab.sink import Sink, SinkSpan
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
EXPORT_SECONDS = 6.0
"""vLLM exports its own spans every 5 s."""
HOOK = (
    semconv.SPAN_REQUEST, semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_LOAD, semconv.SPAN_STORE,
    semconv.SPAN_DECODE,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A prompt of so many tokens, of which so many are in the store (whole chunks) when it is asked for."""

    tokens: int
    stored: int
    seed: int

    @property
    def base(self) -> str:
        """What is stored."""
        return prompt(self.tokens, self.seed)[: self.stored]

    @property
    def text(self) -> str:
        """What is asked for; what is not stored is new."""
        return self.base + prompt(self.tokens - self.stored, self.seed + 500_000)

    @property
    def loaded(self) -> int:
        """Tokens that come from the store; vLLM always computes the last one."""
        return min(self.stored, self.tokens - 1)

    @property
    def commands(self) -> Counter[str]:
        """What Redis should see: an EXISTS for every whole chunk, a GET for every stored, a SET for every new one."""
        chunks, stored = self.tokens // CHUNK, self.stored // CHUNK
        return +Counter(EXISTS=chunks, GET=stored, SET=chunks - stored)

    @property
    def spans(self) -> Counter[str]:
        """Spans of the hook for this request, each exactly once."""
        names = [semconv.SPAN_REQUEST, semconv.SPAN_LOOKUP, semconv.SPAN_DECODE]
        names += [semconv.SPAN_FETCH, semconv.SPAN_LOAD] if self.stored else []
        names += [semconv.SPAN_STORE] if self.commands["SET"] else []
        return Counter(names)


CASES = {
    "hit": Case(4 * CHUNK + 100, 4 * CHUNK, 11),
    "hit of whole chunks": Case(4 * CHUNK, 4 * CHUNK, 12),
    "hit of one chunk": Case(CHUNK + 10, CHUNK, 13),
    "partial hit": Case(5 * CHUNK + 50, 2 * CHUNK, 14),
    "miss": Case(3 * CHUNK + 10, 0, 15),
    "miss of whole chunks": Case(3 * CHUNK, 0, 16),
    "less than a chunk": Case(CHUNK - 56, 0, 17),
}


def store(stack: Stack, cases: list[Case]) -> None:
    """Puts what the cases need into the store, and nothing anywhere else."""
    for case in cases:
        if case.stored:
            stack.client.complete(case.base + "x", max_tokens=1)
    stack.drain()


def of(spans: list[SinkSpan], done: Completion) -> list[SinkSpan]:
    """The hook's spans of one request."""
    inner = {
        span.attributes[semconv.INTERNAL_ID]
        for span in spans
        if span.name == semconv.SPAN_REQUEST and span.attributes[semconv.REQUEST_ID] == done.request_id
    }
    return [span for span in spans if span.name in HOOK and span.attributes[semconv.INTERNAL_ID] in inner]


def round_trips(spans: list[SinkSpan]) -> int:
    """Store operations that the spans tell of."""
    return sum(span.attributes.get(semconv.ROUND_TRIPS, 0) for span in spans)


def vllm_loaded(stack: Stack) -> int:
    """Tokens that vLLM itself counts as loaded by its KV connector."""
    for line in stack.client.get("/metrics").splitlines():
        if line.startswith("vllm:prompt_tokens_by_source_total") and 'source="external_kv_transfer"' in line:
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def service_counts(stack: Stack) -> Counter[str]:
    """The service's own counters of spans and of what went wrong, by name and outcome."""
    with urllib.request.urlopen(stack.service.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts: Counter[str] = Counter()
    wanted = {
        semconv.INGEST_SPANS.name: "ingest",
        semconv.FORWARD_SPANS.name: "forward",
        semconv.INGEST_ORPHANS.name: "orphan",
        semconv.HOOK_RECORDS_DROPPED.name: "dropped",
        semconv.HOOK_ERRORS_TOTAL.name: "errors",
    }
    for line in lines:
        name, _, rest = line.partition("{")
        if name in wanted:
            labels, _, value = rest.rpartition("} ")
            outcome = labels.partition('outcome="')[2].partition('"')[0]
            counts[f"{wanted[name]} {outcome}".strip()] += int(float(value))
    return counts


@pytest.mark.parametrize("kind", CASES)
def test_round_trips_are_what_redis_counts(mp: Stack, sink: Sink, figure: Callable[[str], None], kind: str) -> None:
    case = CASES[kind]
    store(mp, [case])
    mark = sink.mark()

    with mp.redis.counting() as commands:
        done = mp.client.complete(case.text)
        mp.settle_stores()
    sink.settle()
    spans = of(sink.spans(since=mark), done)
    fetches = [span for span in spans if span.name == semconv.SPAN_FETCH]
    figure(f"Redis {dict(commands.delta)}, round trips told {round_trips(spans)}, spans {len(spans)}")

    assert commands.delta == case.commands
    assert round_trips(spans) == commands.delta["EXISTS"] + commands.delta["GET"]
    assert Counter(span.name for span in spans) == case.spans
    assert done.cached == case.loaded
    assert [(span.attributes[semconv.ATTEMPT], span.attributes[semconv.TOKENS]) for span in fetches] == (
        [(1, case.loaded)] if case.loaded else []
    )


def test_a_full_local_hit_reads_the_store_all_the_same(mp: Stack, sink: Sink) -> None:
    case = Case(4 * CHUNK + 100, 4 * CHUNK, 21)
    mp.client.complete(case.text)
    mp.settle_stores()
    mp.clear_l1()  # and vLLM keeps its blocks
    mark = sink.mark()

    with mp.redis.counting() as commands:
        done = mp.client.complete(case.text)
        mp.settle_stores()
    sink.settle()
    spans = of(sink.spans(since=mark), done)

    assert done.cached == 4 * CHUNK
    assert commands.delta == Counter(EXISTS=4, GET=4)  # LMCacheMP's lookup prefetches
    assert round_trips(spans) == 8
    assert Counter(span.name for span in spans) == Counter(
        [semconv.SPAN_REQUEST, semconv.SPAN_LOOKUP, semconv.SPAN_DECODE]
    )


def test_nothing_is_lost_or_doubled_under_concurrency(mp: Stack, sink: Sink, figure: Callable[[str], None]) -> None:
    cases = [Case((2 + n % 4) * CHUNK + 60, (n % 3) * CHUNK, 100 + n) for n in range(24)]
    store(mp, cases)
    sink.settle(quiet=EXPORT_SECONDS, timeout=40)
    mark, before, loaded = sink.mark(), service_counts(mp), vllm_loaded(mp)

    with mp.redis.counting() as commands, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(mp.client.complete, [case.text for case in cases]))
        mp.settle_stores()
    sink.settle(quiet=EXPORT_SECONDS, timeout=40)
    spans, counts = sink.spans(since=mark), service_counts(mp)
    counts.subtract(before)
    hook = [span for span in spans if span.name in HOOK]
    fetched = sum(span.attributes[semconv.TOKENS] for span in hook if span.name == semconv.SPAN_FETCH)
    figure(
        f"{len(cases)} requests, Redis {dict(commands.delta)}, round trips told {round_trips(hook)}, tokens loaded "
        f"{fetched}, spans of the hook {len(hook)}, service {dict(+counts)}"
    )

    assert commands.delta == sum((case.commands for case in cases), Counter())
    assert round_trips(hook) == commands.delta["EXISTS"] + commands.delta["GET"]
    for case, done in zip(cases, answers, strict=True):
        assert Counter(span.name for span in of(spans, done)) == case.spans, case
        assert done.cached == case.loaded
    assert fetched == vllm_loaded(mp) - loaded == sum(case.loaded for case in cases)
    assert len({span.span_id for span in hook}) == len(hook) == sum(case.spans.total() for case in cases)
    assert Counter(span.name for span in spans)[semconv.SPAN_VLLM_REQUEST] == len(cases)
    assert counts["ingest accepted"] == len(hook) + len(cases)
    assert counts["forward sent"] == len(spans)
    assert [counts[bad] for bad in ("ingest rejected", "orphan", "dropped", "errors", "forward failed")] == [0] * 5
    for done in answers:
        record = mp.service.request(done.request_id)
        assert record["vllm"]["ttft_seconds"] is not None
        assert record["trace_id"]
