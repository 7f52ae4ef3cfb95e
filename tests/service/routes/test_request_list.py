"""`GET /v1/requests`: filters, orders, pages that neither repeat nor skip."""

from typing import Any

import httpx2
import pytest

from guard.service import shapes
from guard.service.runtime import Runtime
from guard.wire import FetchRecord, RequestRecord
from tests.service.conftest import NOW

pytestmark = pytest.mark.anyio


def record(number: int, **fields: Any) -> RequestRecord:
    return RequestRecord(**{
        "internal_id": f"r{number}", "request_id": f"r{number}", "trace_id": f"{number:032x}",
        "span_id": f"{number:016x}", "engine_id": "h:8000/0", "model": "m", "backend": "a/b", "class_": "1k-2k/c0-4",
        "arrival_ns": int(NOW * 1e9) + number, "prompt_tokens": 1500, "tokens_local": 0, "tokens_matched": 0,
        "tokens_loaded": 0, "tokens_computed": 1500, "ttft": float(number % 7), "intake": 0.0, "queue": 0.0,
        "lookup": 0.0, "slot": 0.0, "fetch": 0.0, "resume": 0.0, "prefill": 0.1, "residual": 0.0, "exposed_wait": 0.0,
        "decision": "none", "reason": "", **fields,
    })  # fmt: skip


async def ids(client: httpx2.AsyncClient, **params: Any) -> list[str]:
    answer = (await client.get("/v1/requests", params=params)).json()
    shapes.RequestsOut.model_validate(answer)
    return [item["internal_id"] for item in answer["requests"]]


async def test_orders_and_filters(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    failed = FetchRecord(span_id="f", attempt=1, start_ns=0, seconds=1.0, outcome="failed")
    for one in (
        record(1, ttft=0.5, lookup=0.3),
        record(2, ttft=None, aborted=True, engine_id="other/0"),
        record(3, ttft=2.0, decision="remote", fetches=[failed], exposed_wait=0.4),
        record(4, ttft=1.0, model="big", class_="8k-16k/c0-4", backend="c/d"),
    ):
        runtime.window.add(one)
    assert await ids(client) == ["r4", "r3", "r2", "r1"]
    assert await ids(client, sort="slowest") == ["r3", "r4", "r1", "r2"]
    assert (await ids(client, sort="miss-latency"))[0] == "r1"
    assert (await ids(client, sort="exposed-wait"))[0] == "r3"
    for params, wanted in (
        ({"model": "big"}, ["r4"]), ({"engine": "other/0"}, ["r2"]), ({"backend": "c/d"}, ["r4"]),
        ({"class": "8k-16k/c0-4"}, ["r4"]), ({"decision": "remote"}, ["r3"]), ({"aborted": True}, ["r2"]),
        ({"aborted": False, "min_ttft_seconds": 1.0}, ["r4", "r3"]), ({"failed": True}, ["r3"]),
        ({"failed": False, "limit": 2}, ["r4", "r2"]), ({"since_seconds": 1}, ["r4", "r3", "r2", "r1"]),
    ):  # fmt: skip
        assert await ids(client, **params) == wanted, params
    runtime.window.add(record(5, arrival_ns=int((NOW - 100) * 1e9)))
    assert "r5" not in await ids(client, since_seconds=50)


@pytest.mark.parametrize("sort", ["latest", "slowest"])
async def test_pages_hold_every_request_once_while_new_ones_come_and_old_ones_go(
    client: httpx2.AsyncClient, runtime: Runtime, sort: str
) -> None:
    for number in range(1, 41):
        runtime.window.add(record(number))
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = (await client.get("/v1/requests", params={"sort": sort, "limit": 7, "cursor": cursor})).json()
        seen += [item["internal_id"] for item in answer["requests"]]
        cursor = answer["next_cursor"]
        runtime.window.add(record(100 + len(seen), ttft=99.0))
    old = [item for item in seen if int(item[1:]) <= 40]
    assert sorted(old) == sorted(f"r{number}" for number in range(1, 41))
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    "params", [{"cursor": "x"}, {"cursor": "WyJzbG93ZXN0IiwgMS4wLCAiMDAiXQ"}, {"cursor": "W10"}, {"cursor": "é"}]
)
async def test_a_cursor_that_is_none_of_ours_or_of_another_order_is_400(
    client: httpx2.AsyncClient, params: dict[str, str]
) -> None:
    answer = await client.get("/v1/requests", params=params)
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:kvguard:problem:bad-cursor")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "sort=best", "since_seconds=inf", "since_seconds=nan", "min_ttft_seconds=nan"]
)
async def test_parameters_that_cannot_be_are_422(client: httpx2.AsyncClient, query: str) -> None:
    assert (await client.get(f"/v1/requests?{query}")).status_code == 422
