"""`GET /v1/directives/{engine_id}` over HTTP."""

from typing import Any

import httpx2
import pytest

from guard.service.runtime import Runtime
from guard.wire import DirectiveSet

pytestmark = pytest.mark.anyio


async def test_the_answer_is_a_directive_set(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    answer = await client.get(
        "/v1/directives/10.0.0.1:8000/3?schema=1&backend=a/b&backend=c&model=org/m&hook=0.1.0&wait=5"
    )
    found = DirectiveSet.from_json(answer.json())
    assert answer.headers["etag"] == f'"{found.etag}"'
    assert (found.engine_id, [item.backend for item in found.directives]) == ("10.0.0.1:8000/3", ["a/b", "c"])
    poll = runtime.registry.engines["10.0.0.1:8000/3"].poll
    assert (poll.model, poll.backends, poll.hook) == ("org/m", ("a/b", "c"), "0.1.0")


@pytest.mark.parametrize("form", ['"{}"', "{}", 'W/"{}"'])
async def test_304_for_the_tag_in_any_form(client: httpx2.AsyncClient, form: str) -> None:
    tag = (await client.get("/v1/directives/e?backend=a")).json()["etag"]
    answer = await client.get("/v1/directives/e?backend=a&wait=0.01", headers={"If-None-Match": form.format(tag)})
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", f'"{tag}"')


async def test_goodbye(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    await client.get("/v1/directives/10.0.0.1:8000/3?backend=a/b")
    for _ in range(2):
        assert (await client.delete("/v1/directives/10.0.0.1:8000/3")).status_code == 204
    assert runtime.registry.engines == {}
    assert 'engine_id="10.0.0.1:8000/3"' not in (await client.get("/metrics")).text


async def test_the_goodbye_of_a_crash(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    await client.get("/v1/directives/10.0.0.1:8000/3?backend=a/b")
    for query in ("error=a%00b", "error=" + "x" * 300):
        assert (await client.delete(f"/v1/directives/10.0.0.1:8000/3?{query}")).status_code == 400
    assert (await client.delete("/v1/directives/10.0.0.1:8000/3?error=RuntimeError")).status_code == 204
    hands.advance(90)
    (row,) = (await client.get("/v1/offload")).json()["engines"]
    assert (row["silent"], row["last_poll_age_seconds"]) == (True, 90.0)
    assert 'kvguard_directive_age_seconds{engine_id="10.0.0.1:8000/3"} 90\n' in (await client.get("/metrics")).text


async def test_a_newer_hook_is_answered_in_our_schema(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/v1/directives/e?schema=99&backend=a")).json()["schema"] == 1


@pytest.mark.parametrize(
    "query",
    ["schema=x", "schema=-1", "wait=x", "wait=-1", "wait=nan", "wait=inf", "backend=", "backend=" + "x" * 300,
     "model=a%00b", "&".join(f"backend={n}" for n in range(17))],
)  # fmt: skip
async def test_what_cannot_be_understood_is_400(client: httpx2.AsyncClient, runtime: Runtime, query: str) -> None:
    answer = await client.get(f"/v1/directives/e?{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert answer.json()["instance"] == "/v1/directives/e"
    assert runtime.registry.engines == {}


async def test_an_engine_id_that_is_too_long(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/v1/directives/" + "e" * 300)).status_code == 400


async def test_an_engine_without_an_id(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    assert (await client.get("/v1/directives/")).status_code == 400
    assert runtime.registry.engines == {}


async def test_more_engines_than_there_is_room_for(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    runtime.registry._max = 2
    codes = [(await client.get(f"/v1/directives/e/{n}")).status_code for n in range(3)]
    assert codes == [200, 200, 503]
