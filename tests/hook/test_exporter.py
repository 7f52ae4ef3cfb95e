import gzip
import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import guard
from guard import semconv
from guard.hook import exporter as exporter_module
from guard.hook.config import HookConfig
from guard.hook.exporter import BATCH_RECORDS, DRAIN_SECONDS, RETRY_SECONDS, SLICE_SPANS, Exporter
from guard.hook.failsafe import Failsafe
from guard.hook.recorder import Recorder
from guard.hook.transport import Reply
from guard.wire import Span

RESOURCE = {"service.name": "vllm", "process.pid": 7}


def make_span(number: int, **attributes: Any) -> Span:
    return Span(
        name=semconv.SPAN_REQUEST if number % 2 else semconv.SPAN_FETCH,
        trace_id=f"{number + 1:032x}",
        span_id=f"{number + 1:016x}",
        parent_id="" if number % 2 else f"{number + 2:016x}",
        start_ns=1_700_000_000_000_000_000 + number,
        end_ns=1_700_000_000_000_000_000 + 2 * number,
        attributes=attributes
        or {"kvguard.ttft": number / 7, "kvguard.tokens": number, "gen_ai.request.id": f"r{number}"},
        kind=1 if number % 2 else 3,
        error=number % 3 == 0,
    )


@dataclass
class FakeRecord:
    found: list[Span]

    def spans(self) -> Iterable[Span]:
        return iter(self.found)


class BrokenRecord:
    def spans(self) -> Iterable[Span]:
        yield make_span(1)
        raise KeyError("a bug")


@dataclass
class FakeTransport:
    """Answers from a list, the last one for ever; an exception in the list is raised."""

    answers: list[Reply | OSError] = field(default_factory=lambda: [Reply(200, b"{}")])
    bodies: list[bytes] = field(default_factory=list)
    failovers: int = 0

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        self.bodies.append(body or b"")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def failover(self) -> None:
        self.failovers += 1

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def fill(recorder: Recorder, count: int) -> list[Span]:
    spans = [make_span(number) for number in range(count)]
    for span in spans:
        recorder.append(FakeRecord([span]))
    return spans


def decode(body: bytes) -> tuple[dict[str, Any], list[Span]]:
    (resource,) = json.loads(body)["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    spans = [
        Span(
            name=item["name"],
            trace_id=item["traceId"],
            span_id=item["spanId"],
            parent_id=item.get("parentSpanId", ""),
            start_ns=int(item["startTimeUnixNano"]),
            end_ns=int(item["endTimeUnixNano"]),
            attributes=values(item["attributes"]),
            kind=item["kind"],
            error=item.get("status", {}).get("code") == 2,
        )
        for item in scope["spans"]
    ]
    return values(resource["resource"]["attributes"]), spans


def values(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        item["key"]: int(value) if kind == "intValue" else value
        for item in items
        for kind, value in item["value"].items()
    }


def make(service_url: str, recorder: Recorder, **more: Any) -> Exporter:
    return Exporter(HookConfig(endpoints=(service_url,)), recorder, RESOURCE, pause=lambda _: None, **more)


def fake(recorder: Recorder, transport: FakeTransport, clock: Any, **more: Any) -> Exporter:
    return make("http://unused", recorder, transport=transport, clock=clock, **more)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(1024)


def test_spans_arrive_as_they_were_recorded(service: Any, recorder: Recorder):
    spans = fill(recorder, 100)
    exporter = make(service.url, recorder)
    assert exporter.step() == DRAIN_SECONDS
    exporter._transport.close()
    (request,) = service.seen
    assert (request.method, request.path) == ("POST", "/v1/traces")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["content-encoding"] == "gzip"
    resource, found = decode(request.body)
    assert found == spans
    assert resource == {**RESOURCE, semconv.RECORDS_DROPPED: 0, semconv.HOOK_ERRORS: 0}


def test_an_empty_ring_sends_nothing(clock: Any, recorder: Recorder):
    transport = FakeTransport()
    assert fake(recorder, transport, clock).step() == DRAIN_SECONDS
    assert transport.bodies == []
    assert DRAIN_SECONDS <= 0.2


def test_a_full_batch_is_followed_at_once_by_the_rest(clock: Any, recorder: Recorder):
    fill(recorder, BATCH_RECORDS + 1)
    transport = FakeTransport()
    exporter = fake(recorder, transport, clock)
    assert [exporter.step(), exporter.step()] == [0.0, DRAIN_SECONDS]
    assert [len(decode(gzip.decompress(body))[1]) for body in transport.bodies] == [BATCH_RECORDS, 1]


def test_records_that_wait_for_more_are_neither_sent_nor_looked_at_again_at_once(clock: Any, recorder: Recorder):
    class Waiting:
        def spans(self) -> Iterable[Span]:
            recorder.append(self)  # as a read does until the trace of its request is known
            return iter(())

    for _ in range(BATCH_RECORDS):
        recorder.append(Waiting())
    transport = FakeTransport()
    exporter = fake(recorder, transport, clock)
    assert [exporter.step(), exporter.step()] == [DRAIN_SECONDS, DRAIN_SECONDS]
    assert transport.bodies == []
    recorder.append(FakeRecord([make_span(1)]))
    assert [exporter.step(), exporter.step()] == [DRAIN_SECONDS, DRAIN_SECONDS]
    (body,) = transport.bodies
    assert len(decode(gzip.decompress(body))[1]) == 1
    assert (len(recorder), exporter.dropped) == (BATCH_RECORDS, 0)


def test_a_full_ring_is_counted_and_told(service: Any):
    recorder = Recorder(4)
    spans = fill(recorder, 10)
    exporter = make(service.url, recorder)
    exporter.step()
    exporter._transport.close()
    resource, found = decode(service.seen[0].body)
    assert found == spans[-4:]
    assert resource[semconv.RECORDS_DROPPED] == exporter.dropped == 6


def test_losses_are_told_even_when_there_is_nothing_else_to_tell(clock: Any, recorder: Recorder):
    transport = FakeTransport()
    failsafe = Failsafe()
    exporter = fake(recorder, transport, clock, failsafe=failsafe)
    failsafe.record("lookup", ValueError("x"))
    exporter.step()
    exporter.step()
    failsafe.record("lookup", ValueError("x"))
    exporter.step()  # too early for more news
    clock.advance(1.0)
    exporter.step()
    told = [decode(gzip.decompress(body)) for body in transport.bodies]
    assert [resource[semconv.HOOK_ERRORS] for resource, _ in told] == [1, 2]
    assert [spans for _, spans in told] == [[], []]


def test_nan_and_infinities_cost_their_attribute_only(service: Any, recorder: Recorder):
    recorder.append(FakeRecord([make_span(1, a=math.nan, b=math.inf, c=-math.inf, d=1.5)]))
    exporter = make(service.url, recorder)
    exporter.step()
    exporter._transport.close()
    _, (span,) = decode(service.seen[0].body)
    assert span.attributes == {"d": 1.5}


def test_a_record_that_raises_costs_itself_only(clock: Any, recorder: Recorder):
    recorder.append(FakeRecord([make_span(3)]))
    recorder.append(BrokenRecord())
    recorder.append(FakeRecord([make_span(5)]))
    transport = FakeTransport()
    failsafe = Failsafe()
    exporter = fake(recorder, transport, clock, failsafe=failsafe)
    exporter.step()
    assert decode(gzip.decompress(transport.bodies[0]))[1] == [make_span(3), make_span(5)]
    assert (failsafe.errors, exporter.dropped) == (1, 1)
    clock.advance(1.0)
    exporter.step()
    resource, _ = decode(gzip.decompress(transport.bodies[1]))
    assert (resource[semconv.RECORDS_DROPPED], resource[semconv.HOOK_ERRORS]) == (1, 1)


class Pauses:
    """Counts encoded spans between two pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slices = [0]
        self.seconds: list[float] = []
        encode = exporter_module.encode_span

        def counted(span: Span) -> str:
            self.slices[-1] += 1
            return encode(span)

        monkeypatch.setattr(exporter_module, "encode_span", counted)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.slices.append(0)


@pytest.mark.parametrize("per_record", [1, 7, 100])
def test_a_slice_ends_after_so_many_spans(per_record: int, monkeypatch: pytest.MonkeyPatch, clock: Any):
    recorder = Recorder(1024)
    for number in range(210 // per_record):
        recorder.append(FakeRecord([make_span(number)] * per_record))
    pauses = Pauses(monkeypatch)
    exporter = Exporter(
        HookConfig(endpoints=("http://unused",)),
        recorder,
        RESOURCE,
        transport=FakeTransport(),
        clock=clock,  # stands still: the slice is fast
        pause=pauses,
    )
    exporter.step()
    assert sum(pauses.slices) == 210 // per_record * per_record
    assert max(pauses.slices) == SLICE_SPANS
    assert all(0 < seconds <= 0.001 for seconds in pauses.seconds)


def test_a_slice_ends_after_its_time_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch, new_clock: Any):
    recorder = Recorder(1024)
    fill(recorder, 50)
    pauses = Pauses(monkeypatch)
    exporter = Exporter(
        HookConfig(endpoints=("http://unused",)),
        recorder,
        RESOURCE,
        transport=FakeTransport(),
        clock=new_clock(per_call=0.0002),  # every span takes 0.2 ms
        pause=pauses,
    )
    exporter.step()
    assert sum(pauses.slices) == 50
    assert max(pauses.slices) * 0.0002 <= 0.001


def test_a_slow_record_yields_inside(monkeypatch: pytest.MonkeyPatch, clock: Any):
    recorder = Recorder(16)
    recorder.append(FakeRecord([make_span(number) for number in range(1000)]))
    pauses = Pauses(monkeypatch)
    Exporter(
        HookConfig(endpoints=("http://unused",)),
        recorder,
        RESOURCE,
        transport=FakeTransport(),
        clock=clock,
        pause=pauses,
    ).step()
    assert max(pauses.slices) == SLICE_SPANS


def test_a_dead_service_costs_nothing_but_a_line(
    clock: Any, recorder: Recorder, caplog: pytest.LogCaptureFixture, service: Any
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    failsafe = Failsafe()
    exporter = make(url, recorder, clock=clock, failsafe=failsafe)
    spans = fill(recorder, 3)
    for _ in range(50):
        exporter.step()
        clock.advance(0.1)
    assert (failsafe.errors, exporter.dropped) == (0, 0)
    assert len(caplog.records) == 1
    exporter._transport._endpoints = exporter_module.HttpTransport(HookConfig(endpoints=(service.url,)))._endpoints
    clock.advance(10)
    exporter.step()
    exporter._transport.close()
    assert decode(service.seen[0].body)[1] == spans


def test_attempts_are_spaced_while_the_service_is_away(clock: Any, recorder: Recorder):
    transport = FakeTransport([ConnectionRefusedError()])
    exporter = fake(recorder, transport, clock)
    fill(recorder, 1)
    for _ in range(200):  # 20 s
        exporter.step()
        clock.advance(0.1)
    assert 6 <= len(transport.bodies) <= 20


def test_after_an_outage_stale_batches_are_dropped_and_counted(clock: Any, recorder: Recorder):
    transport = FakeTransport([ConnectionRefusedError()])
    exporter = fake(recorder, transport, clock)
    fill(recorder, 5)
    while exporter.dropped == 0:
        exporter.step()
        clock.advance(0.1)
        assert clock.now < 1000 + RETRY_SECONDS + 10
    assert clock.now >= 1000 + RETRY_SECONDS
    assert exporter.dropped == 5
    transport.answers = [Reply(200, b"")]
    recorder.append(FakeRecord([make_span(9)]))
    clock.advance(10)
    exporter.step()
    resource, spans = decode(gzip.decompress(transport.bodies[-1]))
    assert spans == [make_span(9)]
    assert resource[semconv.RECORDS_DROPPED] == 5


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int, clock: Any, recorder: Recorder):
    transport = FakeTransport([Reply(status, b"", 7.0), Reply(200, b"")])
    exporter = fake(recorder, transport, clock)
    spans = fill(recorder, 2)
    exporter.step()
    clock.advance(6.9)
    exporter.step()
    assert len(transport.bodies) == 1
    clock.advance(0.2)
    exporter.step()
    assert [decode(gzip.decompress(body))[1] for body in transport.bodies] == [spans, spans]
    assert exporter.dropped == 0


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_refused_batch_is_dropped_counted_and_the_next_goes_at_once(status: int, clock: Any, recorder: Recorder):
    transport = FakeTransport([Reply(status, b"no"), Reply(200, b"")])
    exporter = fake(recorder, transport, clock)
    fill(recorder, 3)
    exporter.step()
    assert exporter.dropped == 3
    recorder.append(FakeRecord([make_span(7)]))
    exporter.step()
    resource, spans = decode(gzip.decompress(transport.bodies[1]))
    assert (spans, resource[semconv.RECORDS_DROPPED]) == ([make_span(7)], 3)


@pytest.mark.parametrize("answer", [Reply(401, b""), Reply(404, b""), Reply(500, b""), Reply(301, b""), TimeoutError()])
def test_everything_else_is_tried_again(answer: Any, clock: Any, recorder: Recorder):
    transport = FakeTransport([answer, Reply(200, b"")])
    exporter = fake(recorder, transport, clock)
    spans = fill(recorder, 1)
    exporter.step()
    clock.advance(1.0)
    exporter.step()
    assert decode(gzip.decompress(transport.bodies[1]))[1] == spans
    assert exporter.dropped == 0


def test_fails_over_to_the_next_endpoint_without_waiting(service: Any, recorder: Recorder, clock: Any):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    exporter = Exporter(HookConfig(endpoints=(dead, service.url)), recorder, RESOURCE, clock=clock)
    spans = fill(recorder, 2)
    exporter.step()
    exporter.step()  # the clock stands still
    exporter._transport.close()
    assert decode(service.seen[0].body)[1] == spans


def test_an_internal_error_drops_the_batch_and_goes_on(clock: Any, recorder: Recorder):
    class Buggy(FakeTransport):
        def send(self, *args: Any, **kwargs: Any) -> Reply:
            raise ZeroDivisionError

    failsafe = Failsafe()
    exporter = fake(recorder, Buggy(), clock, failsafe=failsafe)
    fill(recorder, 2)
    assert exporter._guarded_step() == DRAIN_SECONDS
    assert (failsafe.errors, exporter.dropped) == (1, 2)


def test_thread_has_a_name_starts_once_delivers_soon_and_stops(service: Any, recorder: Recorder):
    exporter = make(service.url, recorder)
    exporter.start()
    exporter.start()
    assert [thread.name for thread in threading.enumerate()].count("kvguard-export") == 1
    assert next(thread for thread in threading.enumerate() if thread.name == "kvguard-export").daemon
    recorder.append(FakeRecord([make_span(1)]))
    service.wait_for(1)
    recorder.append(FakeRecord([make_span(2)]))
    exporter.stop(5.0)
    assert "kvguard-export" not in [thread.name for thread in threading.enumerate()]
    assert [span for seen in service.seen for span in decode(seen.body)[1]] == [make_span(1), make_span(2)]


def test_stop_does_not_wait_for_a_service_that_hangs(recorder: Recorder):
    asked = threading.Event()

    class Hanging(FakeTransport):
        released = threading.Event()

        def send(self, *args: Any, **kwargs: Any) -> Reply:
            asked.set()
            self.released.wait(20)
            raise TimeoutError

        def abort(self) -> None:
            self.released.set()

    exporter = make("http://unused", recorder, transport=Hanging())
    fill(recorder, 1)
    exporter.start()
    assert asked.wait(5)
    exporter.stop(0.05)
    thread = exporter._worker._thread
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


FORK = """
import os, sys, threading, zlib
from guard.hook.config import HookConfig
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
from guard.hook.transport import Reply
from guard.wire import Span

class Record:
    def __init__(self, name):
        self.name = name
    def spans(self):
        return [Span(self.name, "1" * 32, "2" * 16, "", 1, 2, {})]

class Transport:
    bodies = b""
    sent = threading.Event()
    def send(self, *args, body, **more):
        self.bodies += zlib.decompress(body, 31)
        self.sent.set()
        return Reply(200, b"")
    def failover(self): pass
    def close(self): pass
    def abort(self): pass

recorder, transport = Recorder(64), Transport()
exporter = Exporter(HookConfig(endpoints=("http://unused",)), recorder, {}, transport=transport)
recorder.append(Record("parent"))
child = os.fork()
if child == 0:
    exporter.stop(1.0)          # nothing to stop here, and no hang
    exporter.start()            # the parent's records are not ours
    recorder.append(Record("child"))
    ok = transport.sent.wait(20)
    alive = [thread.name for thread in threading.enumerate()].count("kvguard-export")
    exporter.stop(5.0)
    ok = ok and b'"child"' in transport.bodies and b'"parent"' not in transport.bodies
    os._exit(0 if ok and alive == 1 and exporter.dropped == 0 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (0 if len(recorder) == 1 else 2))
"""


def test_a_forked_child_has_its_own_thread_and_none_of_the_parents_records():
    done = subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False)
    assert done.returncode == 0


def test_nothing_heavy_is_imported_late():
    """Once the modules are in, an export and a poll import nothing more (imports hold the GIL)."""
    script = """
import sys
from guard.hook.config import HookConfig
from guard.hook.directives import Directives
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
before = set(sys.modules)
class Record:
    def spans(self):
        return []
recorder = Recorder(8)
recorder.append(Record())
config = HookConfig(endpoints=("http://127.0.0.1:9",))
Exporter(config, recorder, {}).step()
Directives(config, "h:1/0", ["b"], "m").poll()
late = set(sys.modules) - before
assert not late, late
assert not {name.split(".")[0] for name in sys.modules} & {"vllm", "opentelemetry", "numpy", "requests", "urllib3"}
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], timeout=60, check=False, cwd=Path(guard.__file__).parents[1]
    )
    assert done.returncode == 0
