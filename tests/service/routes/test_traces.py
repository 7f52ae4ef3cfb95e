"""`POST /v1/traces`: what comes in is joined and found again; what is wrong is told."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from guard import semconv
from guard.service.problems import Problem
from guard.service.routes.traces import Budget
from guard.service.runtime import Runtime

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
PROTOBUF = {"content-type": "application/x-protobuf"}
ENGINE = "10.0.0.1:8000/0"


def span(hands: Any, number: int, **attributes: Any) -> dict[str, Any]:
    start = int(hands.wall * 1e9) - 1_000_000_000
    values = {
        semconv.REQUEST_ID: f"cmpl-{number}", semconv.INTERNAL_ID: f"cmpl-{number}-0", semconv.REQUEST_MODEL: "org/m",
        semconv.ENGINE_ID: ENGINE, semconv.BACKEND: "a/b", semconv.INPUT_TOKENS: 4096, semconv.TOKENS_LOCAL: 0,
        semconv.TOKENS_MATCHED: 0, semconv.TOKENS_LOADED: 0, semconv.TTFT: 0.5, semconv.TIME_QUEUE: 0.1,
        semconv.TIME_PREFILL: 0.4, semconv.DECISION: "none",
    } | attributes  # fmt: skip
    return {
        "traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": semconv.SPAN_REQUEST, "kind": 1,
        "startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 500_000_000),
        "attributes": [{"key": key, "value": _value(value)} for key, value in values.items()],
    }  # fmt: skip


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"doubleValue": value} if isinstance(value, float) else {"intValue": str(value)}


def body(*spans: dict[str, Any], **resource: Any) -> bytes:
    attributes = [{"key": key, "value": _value(value)} for key, value in resource.items()]
    resource_spans = {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}
    return json.dumps({"resourceSpans": [resource_spans]}).encode()


def series(text: str, name: str) -> dict[str, float]:
    found = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name) and not line.startswith("#"))
    return {key.removeprefix(name): float(value) for key, _, value in found}


async def test_a_request_is_joined_counted_and_explained(
    client: httpx2.AsyncClient, runtime: Runtime, hands: Any
) -> None:
    answer = await client.post("/v1/traces", content=body(span(hands, 7)), headers=JSON)
    assert (answer.status_code, answer.json()) == (200, {})
    runtime.tick()
    for any_id in ("cmpl-7", "cmpl-7-0", f"{7:032x}"):
        found = (await client.get(f"/v1/requests/{any_id}")).json()
        assert [item["internal_id"] for item in found["requests"]] == ["cmpl-7-0"]
    assert found["requests"][0]["ttft_seconds"] == 0.5
    metrics = (await client.get("/metrics")).text
    assert series(metrics, "kvguard_ttft_seconds_count").popitem()[1] == 1.0
    assert series(metrics, "kvguard_ingest_spans_total")['{outcome="accepted"}'] == 1.0
    assert series(metrics, "kvguard_ingest_requests_total") == {'{status="200"}': 1.0}


async def test_a_step_of_the_wall_clock_neither_closes_nor_stalls_the_join(
    client: httpx2.AsyncClient, runtime: Runtime, hands: Any
) -> None:
    waits = span(hands, 7, **{semconv.TIME_LOOKUP: 0.1})  # its lookup span never comes
    await client.post("/v1/traces", content=body(waits), headers=JSON)
    hands.wall += 7200  # NTP puts the clock right, and wrong again
    runtime.tick()
    assert (runtime.joiner.pending, len(runtime.window)) == (1, 0)
    hands.wall -= 7200
    hands.advance(11)
    runtime.tick()
    assert (runtime.joiner.pending, len(runtime.window)) == (0, 1)
    assert (await client.get("/v1/requests/cmpl-7")).status_code == 200


async def test_an_external_id_with_several_choices_has_an_entry_for_each(
    client: httpx2.AsyncClient, runtime: Runtime, hands: Any
) -> None:
    spans = [span(hands, n, **{semconv.REQUEST_ID: "cmpl-n", semconv.INTERNAL_ID: f"{n}_cmpl-n"}) for n in (1, 2)]
    await client.post("/v1/traces", content=body(*spans), headers=JSON)
    runtime.tick()
    found = (await client.get("/v1/requests/cmpl-n")).json()["requests"]
    assert [item["internal_id"] for item in found] == ["1_cmpl-n", "2_cmpl-n"]


async def test_protobuf_gzip_and_deflate(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    request = ExportTraceServiceRequest()
    added = request.resource_spans.add().scope_spans.add().spans.add()
    added.name, added.trace_id, added.span_id = semconv.SPAN_REQUEST, b"t" * 16, b"s" * 8
    added.start_time_unix_nano, added.end_time_unix_nano = int(hands.wall * 1e9), int(hands.wall * 1e9) + 1000
    count = added.attributes.add()
    count.key, count.value.int_value = semconv.INPUT_TOKENS, 100
    plain = request.SerializeToString()
    for encoding, packed in (("", plain), ("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
        headers = PROTOBUF | ({"content-encoding": encoding} if encoding else {})
        answer = await client.post("/v1/traces", content=packed, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-protobuf")
        assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert runtime.joiner.counts.received == 3
    assert runtime.joiner.counts.duplicates == 2


async def test_broken_spans_cost_only_themselves(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    backwards = span(hands, 2) | {"endTimeUnixNano": "1700000000000000000"}
    answer = await client.post("/v1/traces", content=body(span(hands, 1), backwards), headers=JSON)
    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert answer.json()["partialSuccess"]["errorMessage"]
    runtime.tick()
    assert (await client.get("/v1/requests/cmpl-1")).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b'{"resourceSpans": 3}', JSON, 400),
        (b"\x0a\xff\xff", PROTOBUF, 400),
        (b"not gzip", JSON | {"content-encoding": "gzip"}, 400),
        (gzip.compress(b"{}" * 1000)[:-4], JSON | {"content-encoding": "gzip"}, 400),
        (gzip.compress(bytes(70 << 20), 9), JSON | {"content-encoding": "gzip"}, 413),
        (b"x", {"content-type": "text/plain"}, 415),
        (b"x", {}, 415),
        (b"x", JSON | {"content-encoding": "br"}, 415),
    ],
    ids=["json", "shape", "protobuf", "not-gzip", "truncated", "bomb", "text", "none", "br"],
)
async def test_bad_bodies(client: httpx2.AsyncClient, content: bytes, headers: dict[str, str], status: int) -> None:
    answer = await client.post("/v1/traces", content=content, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["detail"]
    assert series((await client.get("/metrics")).text, "kvguard_ingest_requests_total") == {
        f'{{status="{status}"}}': 1.0
    }
    assert (await client.post("/v1/traces", content=b"{}", headers=JSON)).status_code == 200


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(client: httpx2.AsyncClient) -> None:
    read = []

    async def pieces() -> Any:
        for _ in range(100):
            read.append(1 << 20)
            yield bytes(1 << 20)

    told = await client.post("/v1/traces", content=pieces(), headers=JSON | {"content-length": str(100 << 20)})
    assert (told.status_code, told.json()["detail"]) == (413, "the body is larger than 16777216 bytes")
    untold = await client.post("/v1/traces", content=pieces(), headers=JSON)
    assert untold.status_code == 413
    assert sum(read) <= 2 * (100 << 20)


def test_the_budget_says_503_with_retry_after_and_is_given_back() -> None:
    budget = Budget(100)
    assert budget.take(60) == 60
    with pytest.raises(Problem) as caught:
        budget.take(41)
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    budget.give(60)
    assert budget.take(100) == 100


async def test_too_much_at_once_is_503_and_the_budget_recovers(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    budget: Budget = client._transport.app.state.budget  # type: ignore[attr-defined]
    whole, budget.left = budget.left, 1
    answer = await client.post("/v1/traces", content=b"{}", headers=JSON)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    budget.left = whole
    for content in (b"{}", b"{"):
        await client.post("/v1/traces", content=content, headers=JSON)
    assert budget.left == whole


async def test_a_large_body_does_not_hold_up_the_others(client: httpx2.AsyncClient, hands: Any) -> None:
    spans = [span(hands, number) for number in range(1, 4001)]
    large = body(*spans)
    assert len(large) > 1 << 20
    sending = asyncio.create_task(
        client.post("/v1/traces", content=gzip.compress(large, 1), headers=JSON | {"content-encoding": "gzip"})
    )
    answers = 0
    while not sending.done():
        assert (await client.get("/livez")).status_code == 200
        answers += 1
        await asyncio.sleep(0.001)
    assert (await sending).status_code == 200
    assert answers > 1


async def test_hook_totals_of_a_process_are_counted_once(
    client: httpx2.AsyncClient, runtime: Runtime, hands: Any
) -> None:
    number = iter(range(1, 100))

    async def tell(pid: int, dropped: int) -> float:
        resource = {semconv.ENGINE_ID: ENGINE, semconv.PROCESS_PID: pid, semconv.RECORDS_DROPPED: dropped}
        await client.post("/v1/traces", content=body(span(hands, next(number)), **resource), headers=JSON)
        found = series((await client.get("/metrics")).text, "kvguard_hook_records_dropped_total")
        return found[f'{{engine_id="{ENGINE}"}}']

    assert await tell(1, 5) == 5
    assert await tell(1, 5) == 5
    assert await tell(1, 8) == 8
    assert await tell(2, 1) == 9  # another process of the engine
    assert await tell(1, 3) == 12  # started anew under the same number
    assert await tell(2, 1) == 12


async def test_correlation(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    spans = [span(hands, number) for number in range(1, 41)]
    spans += [span(hands, 50, **{semconv.BACKEND: "c/d", semconv.DECISION: "skip"})]
    await client.post("/v1/traces", content=body(*spans), headers=JSON)
    runtime.tick()
    data = (await client.get("/v1/correlation")).json()
    assert (data["n"], data["source"]) == (41, "measured")
    assert [(row["engine_id"], row["backend"], row["n"]) for row in data["engines"]] == [
        (ENGINE, "a/b", 40), (ENGINE, "c/d", 1),
    ]  # fmt: skip
    assert data["engines"][0]["ttft"] == {"p50": 0.5, "p95": 0.5}
    assert (await client.get("/v1/correlation", params={"backend": "c/d"})).json()["n"] == 1
    hands.advance(100)
    assert (await client.get("/v1/correlation", params={"since_seconds": 50})).json()["n"] == 0
    assert (await client.get("/v1/correlation", params={"since_seconds": 0})).status_code == 422


async def test_orphans_reach_the_metrics(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    orphan = span(hands, 1) | {"name": semconv.SPAN_FETCH, "parentSpanId": f"{9:016x}"}
    await client.post("/v1/traces", content=body(orphan), headers=JSON)
    hands.advance(1000)
    runtime.tick()
    assert series((await client.get("/metrics")).text, "kvguard_ingest_orphans_total") == {'{kind="kv.fetch"}': 1.0}


async def test_no_such_request(client: httpx2.AsyncClient) -> None:
    answer = await client.get("/v1/requests/nobody")
    assert (answer.status_code, answer.json()["title"]) == (404, "Not Found")
