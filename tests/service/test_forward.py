"""Forwarding: what goes out, what is dropped, and that ingest never waits."""

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard.errors import ConfigError, WireError
from guard.service.forward import FORWARDED, Export, Forwarder, read_headers
from guard.service.sampling import keeps, sample

pytestmark = pytest.mark.anyio

URL = "http://collector:4318/v1/traces"


class Collector:
    """The user's endpoint: answers what it is told to, remembers what came."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx2.Request] = []
        self.counts: Counter[str] = Counter()
        self.waits: list[float] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return httpx2.Response(answer, headers={"retry-after": "7"} if answer == 503 else {})

    def count(self, outcome: str, spans: int) -> None:
        self.counts[outcome] += spans

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def forwarder(self, **more: Any) -> Forwarder:
        client = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return Forwarder(client, URL, count=self.count, sleep=self.sleep, **more)  # type: ignore[arg-type]


async def send(collector: Collector, *exports: Export, **more: Any) -> None:
    forwarder = collector.forwarder(**more)
    for export in exports:
        forwarder.offer(export)
    task = asyncio.create_task(forwarder.run())
    want = sum(export.spans for export in exports)
    for _ in range(500):
        if collector.counts.total() >= want:
            break
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_body_goes_out_as_it_came() -> None:
    collector = Collector()
    export = Export(gzip.compress(otlp([LOW, HIGH])), "application/x-protobuf", "gzip", 3)
    await send(collector, export, headers={"x-api-key": "k"})
    (request,) = collector.requests
    assert (str(request.url), request.content) == (URL, export.body)
    assert request.headers["content-type"] == "application/x-protobuf"
    assert request.headers["content-encoding"] == "gzip"
    assert (request.headers["x-api-key"], request.headers[FORWARDED]) == ("k", "1")
    assert collector.counts == {"sent": 3}


async def test_overload_and_outages_are_tried_again_within_bounds() -> None:
    collector = Collector(503, httpx2.ConnectError("no"), 200)
    await send(collector, Export(b"x", "application/json", "", 2))
    assert (len(collector.requests), collector.waits) == (3, [7.0, 2.0])
    assert collector.counts == {"sent": 2}


async def test_what_cannot_be_sent_is_counted() -> None:
    collector = Collector(503, 503, 503, 400)
    await send(collector, Export(b"x", "application/json", "", 2), Export(b"y", "application/json", "", 5))
    assert len(collector.requests) == 4  # 400 is not tried again
    assert collector.counts == {"failed": 7}


async def test_a_full_queue_drops_the_oldest() -> None:
    collector = Collector()
    exports = [Export(bytes([number]) * 40, "application/json", "", 1) for number in range(5)]
    await send(collector, *exports, queue_bytes=100)
    assert [request.content[0] for request in collector.requests] == [3, 4]
    assert collector.counts == {"dropped": 3, "sent": 2}


async def test_what_waits_when_the_service_stops_counts_as_dropped() -> None:
    collector = Collector()
    hold = asyncio.Event()

    async def stuck(request: httpx2.Request) -> httpx2.Response:
        await hold.wait()
        return httpx2.Response(200)

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(stuck))
    forwarder = Forwarder(client, URL, count=collector.count)
    for _ in range(3):
        forwarder.offer(Export(b"x", "application/json", "", 1))
    task = asyncio.create_task(forwarder.run())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert collector.counts == {"dropped": 3}


def otlp(trace_ids: list[int]) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for trace_id in trace_ids:
        scope.spans.add(trace_id=trace_id.to_bytes(16, "big"), span_id=b"12345678", name="n")
    return request.SerializeToString()


LOW, HIGH = 1 << 62, 3 << 62  # a quarter and three quarters of 2^64


def test_sampling_keeps_whole_traces_by_id() -> None:
    assert [keeps(LOW, 0.5), keeps(HIGH, 0.5), keeps(HIGH, 1.0), keeps(0, 0.0)] == [True, False, True, False]
    assert keeps((7 << 64) + LOW, 0.5)  # the low 64 bits decide
    kept = sample(otlp([LOW, HIGH, LOW]), "application/x-protobuf", "", 0.5)
    assert kept is not None
    request = ExportTraceServiceRequest.FromString(kept[0])
    spans = request.resource_spans[0].scope_spans[0].spans
    assert ([int.from_bytes(span.trace_id, "big") for span in spans], kept[1]) == ([LOW, LOW], 2)
    assert sample(otlp([HIGH]), "application/x-protobuf", "", 0.5) is None


def test_sampling_reads_json_alike() -> None:
    spans = [{"traceId": f"{trace_id:032x}", "name": "n", "events": [1]} for trace_id in (HIGH, LOW)]
    body = json.dumps({"resourceSpans": [{"resource": {"x": 1}, "scopeSpans": [{"spans": spans}]}]}).encode()
    kept = sample(body, "application/json", "", 0.5)
    assert kept is not None
    assert json.loads(kept[0])["resourceSpans"][0] == {"resource": {"x": 1}, "scopeSpans": [{"spans": spans[1:]}]}


NO_ID = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{}]}]}]}'


@pytest.mark.parametrize("body", [b"{", b"[]", NO_ID, b'{"resourceSpans":3}'])
def test_sampling_of_what_is_no_request(body: bytes) -> None:
    with pytest.raises(WireError):
        sample(body, "application/json", "", 0.5)
    with pytest.raises(WireError):
        sample(b"\x0a\xff", "application/x-protobuf", "", 0.5)


@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("content_type", ["application/json", "application/x-protobuf"])
async def test_what_the_caller_did_not_sample_stays_here(content_type: str, encoding: str) -> None:
    request = ExportTraceServiceRequest.FromString(otlp([LOW, HIGH, LOW]))
    unsampled = request.resource_spans[0].scope_spans[0].spans[1]
    unsampled.attributes.add(key="kvguard.sampled").value.bool_value = False
    body = request.SerializeToString()
    if content_type == "application/json":
        attribute = {"key": "kvguard.sampled", "value": {"boolValue": False}}
        spans = [{"traceId": f"{LOW:032x}"}, {"traceId": f"{HIGH:032x}", "attributes": [attribute]}]
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [*spans, spans[0]]}]}]}).encode()
    collector = Collector()

    await send(collector, Export(gzip.compress(body) if encoding else body, content_type, encoding, 3))

    (sent,) = collector.requests
    assert b"kvguard.sampled" not in sent.content
    assert "content-encoding" not in sent.headers
    assert collector.counts == {"sent": 2}


async def test_only_the_sample_is_forwarded_and_the_rest_is_no_loss() -> None:
    collector = Collector()
    protobuf = "application/x-protobuf"
    await send(collector, Export(otlp([HIGH]), protobuf, "", 0), Export(otlp([LOW, HIGH]), protobuf, "", 1), ratio=0.5)
    (request,) = collector.requests
    assert len(ExportTraceServiceRequest.FromString(request.content).resource_spans[0].scope_spans[0].spans) == 1
    assert collector.counts == {"sent": 1}


def test_headers_file(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# key\nAuthorization: Bearer a:b\n\nX-Scope: 7\n")
    assert read_headers(file) == {"authorization": "Bearer a:b", "x-scope": "7"}
    file.write_text("X-Key s3cret\n")
    with pytest.raises(ConfigError, match="line 1: not of the form") as caught:
        read_headers(file)
    assert "s3cret" not in str(caught.value)


async def test_a_service_forwards_what_it_takes_but_nothing_twice(
    settings: Any, make_runtime: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    runtime = make_runtime(settings)
    async with serving(runtime) as client:
        runtime.forwarder = collector.forwarder()
        task = asyncio.create_task(runtime.forwarder.run())
        body = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"other"}]}]}]}'
        headers = {"content-type": "application/json"}
        await client.post("/v1/traces", content=body, headers=headers)
        await client.post("/v1/traces", content=b"{", headers=headers)
        await client.post("/v1/traces", content=body, headers=headers | {FORWARDED: "1"})
        for _ in range(100):
            if collector.counts:
                break
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [request.content for request in collector.requests] == [body]
    assert collector.counts == {"sent": 1}
