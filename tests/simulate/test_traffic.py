import gzip
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from guard import gate, semconv
from guard.hook.recorder import Recorder
from guard.simulate import traffic
from guard.simulate.records import MODEL, engine_id
from guard.simulate.scenario import Scenario, parse
from guard.simulate.traffic import SERVICE, Traffic
from guard.wire import Directive, DirectiveSet, Span

ANCHOR = 1_700_000_000_000_000_000


class Lease:
    def __init__(self, directive: Directive | None = None) -> None:
        self.directive = directive

    def current(self, backend: str) -> Directive | None:
        return replace(self.directive, backend=backend) if self.directive else None


def asked(mode: str, **more: Any) -> Lease:
    return Lease(Directive(id="d", engine_id="e", backend="b", mode=mode, **more))


def scenario(kind: str = "lmcache-mp", *, seed: int = 0, rate: float = 3.0, **link: Any) -> Scenario:
    return parse(
        {
            "seconds": 600,
            "seed": seed,
            "abort": 0.01,
            "engine": {"count": 2, "token_seconds": 8e-5, "local_tokens": 60_000},
            "connector": {"kind": kind, "failures": 0.02},
            "link": {"gbit": 50.0, **link},
            "workload": {"rate": rate, "users": 40, "first_tokens": 3000},
        }
    )


def spans_of(lease: Lease, *, seconds: float = 150.0, seed: int = 0, kind: str = "lmcache-mp") -> list[Span]:
    """All spans of two engines over some simulated minutes; no time passes."""
    recorders = [Recorder(100_000), Recorder(100_000)]
    made = Traffic(scenario(kind, seed=seed), anchor_ns=ANCHOR, recorders=recorders, directives=[lease, lease])
    made.schedule.run_until(seconds)
    return [span for recorder in recorders for record in recorder.drain(100_000) for span in record.spans()]


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


@pytest.fixture(scope="module", params=["lmcache-mp", "lmcache", "mooncake-store"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def spans(kind: str) -> list[Span]:
    return spans_of(asked("auto"), kind=kind)


def test_same_seed_same_spans_other_seed_others():
    assert spans_of(asked("on"), seconds=30.0) == spans_of(asked("on"), seconds=30.0)
    assert spans_of(asked("on"), seconds=30.0) != spans_of(asked("on"), seconds=30.0, seed=1)


def test_every_span_of_the_contract_is_made_and_marked(spans: list[Span], kind: str):
    names = {
        semconv.SPAN_REQUEST,
        semconv.SPAN_LOOKUP,
        semconv.SPAN_FETCH,
        semconv.SPAN_STORE,
        semconv.SPAN_DECODE,
    }
    assert {span.name for span in spans} == names | ({semconv.SPAN_READ} if kind == "lmcache" else set())
    assert all(span.attributes[semconv.SIMULATED] is True for span in spans)
    assert all(span.attributes[semconv.ENGINE_ID] in (engine_id(0), engine_id(1)) for span in spans)
    assert len({span.span_id for span in spans}) == len(spans)
    assert all(ANCHOR <= span.start_ns <= span.end_ns for span in spans)


def test_spans_hang_together(spans: list[Span]):
    by_id = {span.span_id: span for span in spans}
    parents = {
        semconv.SPAN_LOOKUP: semconv.SPAN_REQUEST,
        semconv.SPAN_FETCH: semconv.SPAN_REQUEST,
        semconv.SPAN_DECODE: semconv.SPAN_REQUEST,
        semconv.SPAN_READ: semconv.SPAN_FETCH,
    }
    for name, parent_name in parents.items():
        for span in named(spans, name):
            parent = by_id.get(span.parent_id)
            if parent is None:  # the request is still under way at the end
                continue
            assert (parent.name, parent.trace_id) == (parent_name, span.trace_id)
            if name in (semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_READ):
                assert parent.start_ns <= span.start_ns
                assert span.end_ns <= parent.end_ns


def test_hits_partial_hits_and_misses_all_occur_and_add_up(spans: list[Span]):
    requests = [span.attributes for span in named(spans, semconv.SPAN_REQUEST)]
    for request in requests:
        parts = (semconv.TOKENS_LOCAL, semconv.TOKENS_LOADED, semconv.TOKENS_COMPUTED)
        assert sum(int(request[part]) for part in parts) == request[semconv.INPUT_TOKENS]
        assert int(request[semconv.TOKENS_COMPUTED]) > 0
    decisions = Counter(request[semconv.DECISION] for request in requests)
    assert decisions[semconv.DECISION_REMOTE] > 0.2 * len(requests)
    assert decisions[semconv.DECISION_NONE] > 0.1 * len(requests)
    assert decisions[semconv.DECISION_DECLINE] > 0  # loads that failed
    assert any(request.get(semconv.ABORTED) for request in requests)
    assert sum(int(request[semconv.TOKENS_LOCAL]) > 0 < int(request[semconv.TOKENS_LOADED]) for request in requests) > 5


def test_there_are_hits_and_misses_within_the_first_seconds():
    requests = named(spans_of(asked("auto"), seconds=15.0), semconv.SPAN_REQUEST)
    decisions = Counter(span.attributes[semconv.DECISION] for span in requests)
    assert decisions[semconv.DECISION_REMOTE] >= 0.2 * len(requests)
    assert decisions[semconv.DECISION_NONE] >= 0.2 * len(requests)


def test_the_parts_of_ttft_add_up(spans: list[Span]):
    requests = [span for span in named(spans, semconv.SPAN_REQUEST) if semconv.TTFT in span.attributes]
    for span in requests:
        parts = sum(float(span.attributes[part]) for part in semconv.TIME_PARTS)
        assert span.attributes[semconv.TTFT] == pytest.approx(parts, abs=1e-6)
        assert span.attributes[semconv.TTFT] == pytest.approx(span.seconds, abs=1e-6)


def test_a_fetch_tells_the_idle_round_trip_and_its_bytes(spans: list[Span], kind: str):
    fetches = [span for span in named(spans, semconv.SPAN_FETCH) if span.attributes["kvguard.outcome"] == "ok"]
    assert len(fetches) > 100
    assert {span.attributes[semconv.NETWORK_RTT] for span in fetches} == {0.0002}
    for span in fetches:
        assert span.attributes[semconv.BYTES] == int(span.attributes[semconv.TOKENS]) * 131_072
        assert int(span.attributes[semconv.INFLIGHT]) >= 1
        if kind == "lmcache":  # a round trip per chunk of 256 tokens, and the bytes over 50 Gbit/s
            trips = int(span.attributes[semconv.ROUND_TRIPS])
            assert trips == int(span.attributes[semconv.TOKENS]) // 256
            assert span.seconds >= 0.7 * trips * 0.0002 + int(span.attributes[semconv.BYTES]) / (50e9 / 8)
        else:
            assert semconv.ROUND_TRIPS not in span.attributes  # no hook could see them


def test_reads_are_as_many_as_the_round_trips_of_their_fetch():
    found = spans_of(asked("auto"), kind="lmcache", seconds=120.0)
    reads = Counter(span.parent_id for span in named(found, semconv.SPAN_READ))
    by_id = {span.span_id: span for span in named(found, semconv.SPAN_FETCH)}
    assert len(reads) > 50
    assert all(by_id[fetch].attributes[semconv.ROUND_TRIPS] == count for fetch, count in reads.items())


def test_off_turns_hits_into_recomputes_and_slows_the_first_token_down():
    spans = spans_of(asked("auto"))
    off = spans_of(asked("off"))
    assert named(off, semconv.SPAN_LOOKUP) == named(off, semconv.SPAN_FETCH) == named(off, semconv.SPAN_READ) == []
    requests = named(off, semconv.SPAN_REQUEST)
    assert {(span.attributes[semconv.DECISION], span.attributes[semconv.DECISION_REASON]) for span in requests} == {
        (semconv.DECISION_SKIP, gate.OFF)
    }
    assert {span.attributes[semconv.TOKENS_LOADED] for span in requests} == {0}
    assert _mean_ttft(off) > 1.15 * _mean_ttft(spans)


def _mean_ttft(spans: list[Span]) -> float:
    requests = [span.attributes for span in named(spans, semconv.SPAN_REQUEST)]
    found = [float(each[semconv.TTFT]) for each in requests if semconv.TTFT in each]
    return sum(found) / len(found)


def test_off_does_not_turn_skipped_hits_into_rewrites():
    spans = spans_of(asked("auto"))
    written = sum(int(span.attributes[semconv.TOKENS]) for span in named(spans, semconv.SPAN_STORE))
    while_off = sum(int(span.attributes[semconv.TOKENS]) for span in named(spans_of(asked("off")), semconv.SPAN_STORE))
    assert while_off == pytest.approx(written, rel=0.1)


def test_stores_off_stops_the_writes():
    found = spans_of(asked("auto", stores=False), seconds=60.0)
    assert named(found, semconv.SPAN_STORE) == []
    assert named(found, semconv.SPAN_LOOKUP) != []


def test_without_a_directive_everything_is_admitted():
    reasons = Counter(
        span.attributes[semconv.DECISION_REASON]
        for span in named(spans_of(Lease(), seconds=120.0), semconv.SPAN_REQUEST)
        if span.attributes[semconv.DECISION] == semconv.DECISION_REMOTE
    )
    assert set(reasons) == {gate.NO_DIRECTIVE}


class Service:
    """Takes traces and answers every poll with `off`."""

    def __init__(self) -> None:
        self.traces: list[dict[str, Any]] = []
        self.polls: list[tuple[str, str]] = []
        self.skipped = threading.Event()
        self.acknowledged = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
                outer.traces.append(json.loads(body))
                if b'"skip"' in body:
                    outer.skipped.set()
                self._answer(200, b"{}")

            def do_GET(self) -> None:
                tag = self.headers.get("If-None-Match", "")
                outer.polls.append((self.path, tag))
                if tag:
                    outer.acknowledged.set()
                    outer.skipped.wait(5)
                    self.send_response(304)
                    self.end_headers()
                    return
                number = 0 if engine_id(0).partition(":")[0] in self.path else 1
                name = engine_id(number)
                item = Directive(id="d", engine_id=name, backend="lmcache-mp/simulated", mode="off")
                found = DirectiveSet(engine_id=name, etag="t", directives=(item,))
                self._answer(200, json.dumps(found.to_json()).encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.skipped.set()
    made.server.shutdown()
    made.server.server_close()
    made.thread.join(5)


def test_run_sends_traffic_obeys_directives_and_stops(service: Service):
    stop = threading.Event()
    runner = threading.Thread(
        target=traffic.run, args=(service.url, scenario(rate=40.0, seed=3)), kwargs={"stop_event": stop}
    )
    runner.start()
    assert service.acknowledged.wait(20)
    assert service.skipped.wait(20)
    stop.set()
    runner.join(20)
    assert not runner.is_alive()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvguard-")]
    resources = [
        {item["key"]: item["value"] for item in body["resourceSpans"][0]["resource"]["attributes"]}
        for body in service.traces
    ]
    assert {resource["service.name"]["stringValue"] for resource in resources} == {SERVICE}
    assert all(resource["kvguard.simulated"] == {"boolValue": True} for resource in resources)
    assert any(f"model={MODEL.replace('/', '%2F')}" in path for path, _ in service.polls)


def test_run_ends_after_its_duration_without_a_service():
    traffic.run("http://127.0.0.1:9", scenario(rate=50.0), duration=0.3)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvguard-")]
