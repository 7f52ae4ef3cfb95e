"""LMCache inside vLLM: every operation against the store is one `kvguard.kv.read`, timed where it happens."""

import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Self

import pytest

from guard import semconv
from lab.client import Completion, prompt
from lab.sink import Sink, SinkSpan
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
RTTS_MS = (0, 2, 10)
SMALL_BYTES = 4096
"""A chunk is two keys: its description, which is smaller, and its KV, 1 MiB here."""
ROUNDS = 6
"""Blocks in which every RTT comes once, so that a change of the machine's load hits all of them."""

OPERATIONS = {"exists": "EXISTS", "exists_sync": "EXISTS", "get": "GET", "strlen": "STRLEN"}
"""Redis's command for each operation that LMCache's client is seen to make."""


def reads_of(spans: list[SinkSpan], done: Completion) -> list[SinkSpan]:
    """The reads of one request."""
    inner = {
        span.attributes[semconv.INTERNAL_ID]
        for span in spans
        if span.name == semconv.SPAN_REQUEST and span.attributes[semconv.REQUEST_ID] == done.request_id
    }
    return [s for s in spans if s.name == semconv.SPAN_READ and s.attributes[semconv.INTERNAL_ID] in inner]


def operations(reads: list[SinkSpan]) -> Counter[str]:
    """Redis commands that the reads tell of."""
    return Counter(OPERATIONS[read.attributes[semconv.OPERATION]] for read in reads)


def read_commands(delta: Counter[str]) -> Counter[str]:
    """The commands that read."""
    return +Counter({name: delta[name] for name in ("EXISTS", "GET", "STRLEN", "MGET", "GETRANGE")})


@pytest.mark.parametrize(
    ("tokens", "stored"), [(4 * CHUNK + 100, 4 * CHUNK), (5 * CHUNK + 50, 2 * CHUNK), (3 * CHUNK + 10, 0)]
)
def test_every_store_read_is_one_span(
    inprocess: Stack, sink: Sink, figure: Callable[[str], None], tokens: int, stored: int
) -> None:
    text = prompt(tokens, seed=2000 + tokens)
    if stored:
        inprocess.client.complete(text[:stored] + "x", max_tokens=1)
    inprocess.drain()
    mark = sink.mark()

    with inprocess.redis.counting() as commands:
        done = inprocess.client.complete(text)
        inprocess.settle_stores()
    sink.settle()
    spans = sink.spans(since=mark)
    reads = reads_of(spans, done)
    parents = {span.span_id: span.name for span in spans}
    by_parent = Counter((parents.get(read.parent_id), operations([read]).most_common()[0][0]) for read in reads)
    figure(f"Redis {dict(commands.delta)}, reads told {dict(operations(reads))}")

    assert done.cached == stored
    assert operations(reads) == read_commands(commands.delta)
    assert by_parent[semconv.SPAN_LOOKUP, "EXISTS"] == commands.delta["EXISTS"]
    assert by_parent[semconv.SPAN_FETCH, "GET"] == commands.delta["GET"] == 2 * stored // CHUNK
    assert by_parent.total() == by_parent[semconv.SPAN_LOOKUP, "EXISTS"] + by_parent[semconv.SPAN_FETCH, "GET"]
    assert len({read.span_id for read in reads}) == len(reads)
    record = inprocess.service.request(done.request_id)
    assert record["lookup"]["round_trips"] == commands.delta["EXISTS"]
    assert sum(fetch["reads"]["n"] for fetch in record["fetches"]) == commands.delta["GET"]


def test_reads_of_concurrent_requests_stay_apart(inprocess: Stack, sink: Sink, figure: Callable[[str], None]) -> None:
    texts = [prompt((2 + n % 3) * CHUNK + 30, seed=2500 + n) for n in range(12)]
    for text in texts[::2]:
        inprocess.client.complete(text, max_tokens=1)
    inprocess.drain()
    sink.settle()
    mark = sink.mark()

    with inprocess.redis.counting() as commands, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(inprocess.client.complete, texts))
        inprocess.settle_stores()
    sink.settle()
    spans = sink.spans(since=mark)
    reads = sink.spans(semconv.SPAN_READ, since=mark)
    figure(f"Redis {dict(commands.delta)}, reads told {dict(operations(reads))}")

    assert operations(reads) == read_commands(commands.delta)
    assert len({read.span_id for read in reads}) == len(reads)
    for number, (text, done) in enumerate(zip(texts, answers, strict=True)):
        chunks = 0 if number % 2 else len(text) // CHUNK
        assert operations(reads_of(spans, done))["GET"] == 2 * chunks
        assert done.cached == chunks * CHUNK
    traces = {span.span_id: span.trace_id for span in spans}
    assert all(traces[read.parent_id] == read.trace_id for read in reads)


class Witness:
    """Another client of the store on LMCache's own road to it: what one round trip takes at this moment."""

    def __init__(self, stack: Stack) -> None:
        settings = (stack.run_dir / "lmcache.yaml").read_text()
        host, _, port = settings.partition("redis://")[2].partition('"')[0].partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def round_trips(self, count: int) -> list[float]:
        """Milliseconds of so many, one after the other."""
        found = []
        for _ in range(count):
            began = time.perf_counter()
            self._socket.sendall(b"*2\r\n$6\r\nEXISTS\r\n$1\r\nx\r\n")
            assert self._socket.recv(64) == b":0\r\n"
            found.append((time.perf_counter() - began) * 1e3)
        return found


def test_a_read_takes_as_long_as_the_link_says(inprocess: Stack, sink: Sink, figure: Callable[[str], None]) -> None:
    text = prompt(4 * CHUNK + 40, seed=2900)
    inprocess.client.complete(text, max_tokens=1)
    times: dict[str, dict[int, list[float]]] = {
        name: {rtt: [] for rtt in RTTS_MS} for name in ("witness", "EXISTS", "small GET", "large GET", "lookup")
    }
    with Witness(inprocess) as witness:
        for rtt in RTTS_MS * ROUNDS:
            inprocess.drain()
            inprocess.injector.rtt(rtt * 1000)
            mark = sink.mark()
            times["witness"][rtt] += witness.round_trips(4)
            done = inprocess.client.complete(text, max_tokens=2)
            times["witness"][rtt] += witness.round_trips(4)
            sink.settle()
            spans = sink.spans(since=mark)
            for read in reads_of(spans, done):
                kind = OPERATIONS[read.attributes[semconv.OPERATION]]
                if kind == "GET":
                    kind = "small GET" if read.attributes[semconv.BYTES] < SMALL_BYTES else "large GET"
                times[kind][rtt].append(read.seconds * 1e3)
            times["lookup"][rtt] += [span.seconds * 1e3 for span in spans if span.name == semconv.SPAN_LOOKUP]
    low, middle, high = RTTS_MS
    grown = {name: median(of[high]) - median(of[low]) for name, of in times.items()}
    slopes = {name: more / grown["witness"] for name, more in grown.items()}
    for name, of in times.items():
        medians = ", ".join(f"{rtt} ms: {median(of[rtt]):.2f}" for rtt in RTTS_MS)
        figure(f"{name}: median ms at RTT {medians}; {slopes[name]:.2f} per round trip (n={len(of[high])} each)")

    assert grown["witness"] >= high - low
    del times["witness"]
    assert {name: len(of[high]) for name, of in times.items()} == {
        "EXISTS": 4 * ROUNDS, "small GET": 4 * ROUNDS, "large GET": 4 * ROUNDS, "lookup": ROUNDS,
    }  # fmt: skip
    # An EXISTS is one round trip, as another client sees it at the same time; 20 % is left to the scheduler.
    assert slopes["EXISTS"] == pytest.approx(1.0, abs=0.2)
    assert median(times["EXISTS"][low]) < median(times["EXISTS"][middle]) < median(times["EXISTS"][high])
    # The lookup asks chunk by chunk: four in a row.
    assert slopes["lookup"] == pytest.approx(4.0, abs=0.8)
    # A GET is one round trip at least; of 1 MiB it takes several until TCP's window is open. Growth is no yardstick:
    # LMCache asks for both keys of a chunk at once, and what its event loop does for the one hides behind the other's
    # round trip when that is long.
    for name in ("small GET", "large GET"):
        for rtt in (middle, high):
            assert min(times[name][rtt]) >= 0.95 * rtt
        assert median(times[name][low]) < median(times[name][high])
    assert slopes["large GET"] >= slopes["small GET"] - 0.2
