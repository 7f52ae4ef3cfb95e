"""`/v1/objectives` over HTTP: what is promised is replaced only by who has seen it."""

from typing import Any

import httpx2
import pytest

pytestmark = pytest.mark.anyio

PATH = "/v1/objectives"


def promise(seconds: float) -> dict[str, Any]:
    return {"objectives": [{"model": "m", "ttft_seconds": seconds, "percentile": 0.95}]}


async def bound(client: httpx2.AsyncClient) -> list[float]:
    return [item["ttft_seconds"] for item in (await client.get(PATH)).json()["objectives"]]


async def test_the_tag_names_what_is_in_force(client: httpx2.AsyncClient) -> None:
    none = (await client.get(PATH)).headers["etag"]
    put = await client.put(PATH, json=promise(2.0))
    assert put.headers["etag"] != none
    assert (await client.get(PATH)).headers["etag"] == put.headers["etag"]
    assert (await client.delete(PATH)).headers["etag"] == none


async def test_a_write_over_what_another_has_changed_is_refused(client: httpx2.AsyncClient) -> None:
    seen = (await client.get(PATH)).headers["etag"]
    put = await client.put(PATH, json=promise(2.0), headers={"If-Match": seen})
    assert put.status_code == 200
    for late in (
        await client.put(PATH, json=promise(3.0), headers={"If-Match": seen}),
        await client.delete(PATH, headers={"If-Match": seen}),
    ):
        assert (late.status_code, late.headers["etag"]) == (412, put.headers["etag"])
        assert late.json()["detail"] == f"the objectives changed meanwhile: they are now {put.headers['etag']}"
    assert await bound(client) == [2.0]
    for header in (put.headers["etag"], "*"):
        assert (await client.put(PATH, json=promise(3.0), headers={"If-Match": header})).status_code == 200
        put = await client.put(PATH, json=promise(2.0))


async def test_without_the_header_the_last_write_holds(client: httpx2.AsyncClient) -> None:
    for seconds in (2.0, 3.0):
        assert (await client.put(PATH, json=promise(seconds))).status_code == 200
    assert await bound(client) == [3.0]
