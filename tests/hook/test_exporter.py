"""The exporter: what arrives, what is lost and counted, and what a bad service costs."""

import gzip
import math
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from guard import semconv
from guard.hook import exporter as exporter_module
from guard.hook.config import HookConfig
from guard.hook.exporter import BATCH_RECORDS, DRAIN_SECONDS, RETRY_SECONDS, Exporter
from guard.hook.failsafe import Failsafe
from guard.hook.recorder import Recorder
from guard.hook.transport import Reply
from guard.wire import Span
from tests.hook.exporting import RESOURCE, BrokenRecord, FakeRecord, decode, fake, fill, make, make_span
from tests.hook.fake_transport import FakeTransport


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
    transport = FakeTransport(ConnectionRefusedError())
    exporter = fake(recorder, transport, clock)
    fill(recorder, 1)
    for _ in range(200):  # 20 s
        exporter.step()
        clock.advance(0.1)
    assert 6 <= len(transport.bodies) <= 20


def test_after_an_outage_stale_batches_are_dropped_and_counted(clock: Any, recorder: Recorder):
    transport = FakeTransport(ConnectionRefusedError())
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
    transport = FakeTransport(Reply(status, b"", 7.0), Reply(200, b""))
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
    transport = FakeTransport(Reply(status, b"no"), Reply(200, b""))
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
    transport = FakeTransport(answer, Reply(200, b""))
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
