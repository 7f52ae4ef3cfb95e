"""`/v1/offload` over HTTP."""

import asyncio
import json
import sqlite3
from typing import Any

import httpx2
import pytest

from guard.service import shapes
from guard.service.runtime import Runtime
from guard.settings import Settings
from guard.wire import Event
from tests.service.conftest import NOW

pytestmark = pytest.mark.anyio

URL = "/v1/offload/"


async def poll(client: httpx2.AsyncClient, engine: str = "h:8000/0", tag: str = "", wait: float = 0) -> httpx2.Response:
    params = {"wait": wait, "schema": 1, "backend": ["a/b"], "model": "org/m", "hook": "0.1.0", "instance": "h:8000"}
    headers = {"If-None-Match": f'"{tag}"'} if tag else {}
    return await client.get(f"/v1/directives/{engine}", params=params, headers=headers)


async def apply(client: httpx2.AsyncClient, engine: str = "h:8000/0") -> None:
    tag = (await poll(client, engine)).json()["etag"]
    assert (await poll(client, engine, tag)).status_code == 304


async def test_put_then_get_delete_and_history(client: httpx2.AsyncClient, hands: Any) -> None:
    answer = await client.put(URL + "fleet", json={"mode": "off", "reason": "link down", "ttl_seconds": 60})
    assert answer.status_code == 200
    shapes.Switched.model_validate(answer.json())
    assert answer.headers["etag"] == '"1"'
    override = answer.json()["override"]
    assert (override["mode"], override["on_lease_expiry"], override["ttl_seconds"]) == ("off", "keep", 60.0)
    assert override["since"] == "2027-01-15T08:00:00Z"
    assert override["expires_at"] == "2027-01-15T08:01:00Z"
    hands.advance(10)
    found = await client.get(URL + "fleet")
    assert (found.json()["ttl_seconds"], found.headers["etag"]) == (50.0, '"1"')
    gone = await client.delete(URL + "fleet", params={"reason": "healed"})
    assert (gone.status_code, gone.json()["override"]) == (200, None)
    assert (await client.get(URL + "fleet")).status_code == 404
    assert (await client.delete(URL + "fleet")).status_code == 404
    history = (await client.get("/v1/offload/history")).json()
    shapes.HistoryOut.model_validate(history)
    assert [(item["action"], item["mode"], item["reason"]) for item in history["switches"]] == [
        ("clear", "off", "healed"),
        ("set", "off", "link down"),
    ]
    assert history["next_before"] is None


async def test_the_default_mode_holds_where_no_switch_is_set(
    make_runtime: Any, serving: Any, settings: Settings
) -> None:
    async with serving(make_runtime(settings.model_copy(update={"default_mode": "observe"}))) as client:
        asked = (await poll(client)).json()["directives"][0]
        assert (asked["mode"], asked["on_lease_expiry"]) == ("observe", "open")
        await client.put(URL + "fleet", json={"mode": "auto"})
        assert (await poll(client)).json()["directives"][0]["mode"] == "auto"
        await client.delete(URL + "fleet")
        assert (await poll(client)).json()["directives"][0]["mode"] == "observe"
        assert (await client.get("/v1/offload")).json()["default_mode"] == "observe"
        assert (
            'kvguard_offload_mode{model_name="org/m",engine_id="h:8000/0",backend="a/b",mode="observe"} 1'
            in (await client.get("/metrics")).text
        )


async def test_history_pages(client: httpx2.AsyncClient) -> None:
    for mode in ("on", "off", "auto"):
        await client.put(URL + "fleet", json={"mode": mode})
    first = (await client.get("/v1/offload/history", params={"limit": 2})).json()
    assert ([item["mode"] for item in first["switches"]], first["next_before"]) == (["auto", "off"], 2)
    rest = (await client.get("/v1/offload/history", params={"limit": 2, "before": 2})).json()
    assert ([item["mode"] for item in rest["switches"]], rest["next_before"]) == (["on"], None)


async def test_the_row_of_an_engine(client: httpx2.AsyncClient, hands: Any) -> None:
    await apply(client)
    await client.put(URL + "backend:a/b", json={"mode": "off", "stores": False, "reason": "slow", "ttl_seconds": 30})
    hands.advance(2)
    data = (await client.get("/v1/offload")).json()
    shapes.OffloadOut.model_validate(data)
    (row,) = data["engines"]
    directive_id = row.pop("directive_id")
    for name in ("projected", "limit", "verdict", "control", "state_since"):
        assert row.pop(name) is None  # the controller has not seen the engine yet
    assert row == {
        "engine_id": "h:8000/0", "backend": "a/b", "model": "org/m", "mode": "off", "scope": "backend:a/b",
        "who": "anonymous@127.0.0.1",
        "state": "bypass", "stores": False, "acknowledged": False, "acknowledged_at": None,
        "last_poll_age_seconds": 2.0, "silent": False, "reason": "slow", "since": "2027-01-15T08:00:00Z",
        "ttl_seconds": 28.0, "hook_version": "0.1.0", "instance": "h:8000",
    }  # fmt: skip
    await apply(client)
    (row,) = (await client.get("/v1/offload")).json()["engines"]
    assert (row["acknowledged"], row["acknowledged_at"]) == (True, "2027-01-15T08:00:02Z")
    assert row["directive_id"] == directive_id
    hands.advance(16)
    (row,) = (await client.get("/v1/offload")).json()["engines"]
    assert (row["silent"], row["last_poll_age_seconds"]) == (True, 16.0)


async def test_a_switch_that_ran_out_is_not_acknowledged_before_the_hook_heard_of_it(
    client: httpx2.AsyncClient, runtime: Runtime, hands: Any
) -> None:
    await client.put(URL + "fleet", json={"mode": "off", "ttl_seconds": 30})
    await apply(client)
    hands.advance(31)
    (row,) = (await client.get("/v1/offload")).json()["engines"]
    assert (row["mode"], row["acknowledged"], row["acknowledged_at"]) == ("auto", False, None)
    runtime.tick()
    await apply(client)
    (row,) = (await client.get("/v1/offload")).json()["engines"]
    assert (row["mode"], row["acknowledged"], row["acknowledged_at"]) == ("auto", True, "2027-01-15T08:00:31Z")


async def test_put_tells_live_engines_and_narrower_switches(client: httpx2.AsyncClient, hands: Any) -> None:
    await poll(client, "old/0")
    hands.advance(20)
    for engine in ("a/0", "b/0"):
        await poll(client, engine)
    await client.put(URL + "engine:a/0", json={"mode": "on"})
    answer = (await client.put(URL + "fleet", json={"mode": "off"})).json()
    assert (answer["engines"], answer["shadowed"], answer["pending"]) == (2, 1, ["a/0", "b/0"])


async def test_wait_answers_when_the_live_engines_have_applied(client: httpx2.AsyncClient) -> None:
    await apply(client, "a/0")
    await apply(client, "b/0")
    switching = asyncio.create_task(client.put(URL + "fleet", json={"mode": "off"}, params={"wait": 30}))
    for _ in range(1000):  # until it is on disk and in force
        if (await client.get(URL + "fleet")).status_code == 200:
            break
        await asyncio.sleep(0.01)
    await apply(client, "a/0")
    await asyncio.sleep(0.1)
    assert not switching.done()
    await apply(client, "b/0")
    answer = (await asyncio.wait_for(switching, 5)).json()
    assert (answer["acknowledged"], answer["pending"]) == (["a/0", "b/0"], [])


async def test_wait_ends_and_names_who_is_late(client: httpx2.AsyncClient) -> None:
    await apply(client, "a/0")
    answer = (await client.put(URL + "fleet", json={"mode": "off"}, params={"wait": 0.05})).json()
    assert (answer["acknowledged"], answer["pending"]) == ([], ["a/0"])


async def test_if_match(client: httpx2.AsyncClient) -> None:
    tag = (await client.put(URL + "fleet", json={"mode": "off"})).headers["etag"]
    second = await client.put(URL + "fleet", json={"mode": "on"}, headers={"If-Match": tag})
    assert second.status_code == 200
    stale = await client.put(URL + "fleet", json={"mode": "auto"}, headers={"If-Match": tag})
    assert (stale.status_code, stale.headers["etag"]) == (412, second.headers["etag"])
    assert stale.headers["content-type"] == "application/problem+json"
    assert (await client.get(URL + "fleet")).json()["mode"] == "on"
    assert (await client.delete(URL + "fleet", headers={"If-Match": tag})).status_code == 412
    assert (await client.put(URL + "model:x", json={"mode": "on"}, headers={"If-Match": "*"})).status_code == 412
    create = {"If-None-Match": "*"}
    assert (await client.put(URL + "model:x", json={"mode": "on"}, headers=create)).status_code == 200
    assert (await client.put(URL + "model:x", json={"mode": "on"}, headers=create)).status_code == 412


@pytest.mark.parametrize("scope", ["model:org/name", "backend:lmcache-mp/resp", "engine:10.0.0.1:8000/0"])
async def test_scopes_with_slashes(client: httpx2.AsyncClient, scope: str) -> None:
    assert (await client.put(URL + scope, json={"mode": "observe"})).json()["scope"] == scope
    assert (await client.get(URL + scope)).json()["mode"] == "observe"
    assert (await client.delete(URL + scope)).status_code == 200


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"mode": "maybe"}, "#/mode"),
        ({}, "#/mode"),
        ({"mode": "off", "ttl_seconds": 0}, "#/ttl_seconds"),
        ({"mode": "off", "ttl_seconds": -1}, "#/ttl_seconds"),
        ({"mode": "off", "ttl_seconds": 1e12}, "#/ttl_seconds"),
        ({"mode": "off", "reason": "x" * 501}, "#/reason"),
        ({"mode": "off", "on_lease_expiry": "close"}, "#/on_lease_expiry"),
        ({"mode": "off", "mdoe": 1}, "#/mdoe"),
    ],
)
async def test_a_body_that_is_wrong_is_told_where(client: httpx2.AsyncClient, body: Any, pointer: str) -> None:
    answer = await client.put(URL + "fleet", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    problem = answer.json()
    assert (problem["status"], problem["title"]) == (422, "Unprocessable Entity") or problem["title"]
    assert [item["pointer"] for item in problem["errors"]] == [pointer]
    assert (await client.get("/v1/offload")).json()["overrides"] == []


async def test_bodies_that_are_not_json(client: httpx2.AsyncClient) -> None:
    for content in (b"", b"{", b'{"mode": NaN}', b"\xff\xfe"):
        answer = await client.put(URL + "fleet", content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422)
        assert answer.headers["content-type"] == "application/problem+json"
    answer = await client.put(URL + "fleet", content=b"x" * 70_000, headers={"content-type": "application/json"})
    assert answer.status_code == 413


async def test_a_bad_scope_is_400(client: httpx2.AsyncClient) -> None:
    answer = await client.put(URL + "pod:x", json={"mode": "off"})
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:kvguard:problem:bad-scope")


async def test_a_switch_ends_with_its_ttl_and_the_ledger_says_so(
    client: httpx2.AsyncClient, runtime: Runtime, hands: Any
) -> None:
    await client.put(URL + "fleet", json={"mode": "off", "ttl_seconds": 5})
    waiting = asyncio.create_task(poll(client, tag=(await poll(client)).json()["etag"], wait=5))
    await asyncio.sleep(0.02)
    hands.advance(5)
    runtime.tick()
    answer = await asyncio.wait_for(waiting, 2)
    assert answer.json()["directives"][0]["mode"] == "auto"
    for _ in range(200):
        history = (await client.get("/v1/offload/history")).json()["switches"]
        if len(history) == 2:
            break
        await asyncio.sleep(0.01)
    assert (history[0]["action"], history[0]["who"], history[0]["at"]) == ("expire", "kvguard", "2027-01-15T08:00:05Z")


async def test_a_full_disk_is_507_and_everything_else_goes_on(
    client: httpx2.AsyncClient, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.put(URL + "fleet", json={"mode": "off"})
    ledger = runtime.journal._ledger
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count={pages}")
    answers = [
        await client.put(URL + f"model:{'m' * 200}{n}", json={"mode": "on", "reason": "x" * 500}) for n in range(40)
    ]
    full = answers[-1]
    assert (full.status_code, full.headers["retry-after"]) == (507, "30")
    assert str(runtime.settings.state_dir) in full.json()["detail"]
    assert (await poll(client)).json()["directives"][0]["mode"] == "off"
    spans = await client.post("/v1/traces", content=b"{}", headers={"content-type": "application/json"})
    assert spans.status_code == 200
    ready = await client.get("/readyz", params={"verbose": ""})
    assert ready.status_code == 200
    assert "[!]ledger degraded: state directory" in ready.text
    ledger._db.execute("PRAGMA max_page_count=100000")
    assert (await client.put(URL + "model:x", json={"mode": "on"})).status_code == 200
    assert "[+]ledger ok" in (await client.get("/readyz?verbose")).text


async def test_a_broken_ledger_is_503(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    def broken(_: Any) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    runtime.journal._ledger._log = lambda *_: broken(None)  # type: ignore[method-assign]
    answer = await client.put(URL + "fleet", json={"mode": "off"})
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:kvguard:problem:ledger")
    assert (await client.get("/v1/offload")).json()["overrides"] == []


async def test_an_idempotency_key_switches_once_whatever_happens_in_between(
    client: httpx2.AsyncClient, hands: Any
) -> None:
    headers = {"Idempotency-Key": "retry-1"}
    first = await client.put(URL + "fleet", json={"mode": "off", "ttl_seconds": 60}, headers=headers)
    assert "idempotent-replayed" not in first.headers
    hands.advance(5)
    again = await client.put(URL + "fleet", json={"mode": "off", "ttl_seconds": 60}, headers=headers)
    assert (again.status_code, again.headers["idempotent-replayed"], again.headers["etag"]) == (200, "true", '"1"')
    assert again.json()["override"]["expires_at"] == first.json()["override"]["expires_at"]
    other = await client.put(URL + "fleet", json={"mode": "on"}, headers=headers)
    assert (other.status_code, other.json()["type"]) == (422, "urn:kvguard:problem:idempotency-key-reused")
    elsewhere = await client.put(URL + "model:m", json={"mode": "off", "ttl_seconds": 60}, headers=headers)
    assert elsewhere.status_code == 422
    gone = [await client.delete(URL + "fleet", headers={"Idempotency-Key": "retry-2"}) for _ in range(2)]
    assert [answer.status_code for answer in gone] == [200, 200]  # without the key the second is a 404
    assert [item["action"] for item in (await client.get("/v1/offload/history")).json()["switches"]] == ["clear", "set"]


async def test_the_same_request_twice_at_once_with_one_key_switches_once(client: httpx2.AsyncClient) -> None:
    headers = {"Idempotency-Key": "both"}
    answers = await asyncio.gather(
        *(client.put(URL + "fleet", json={"mode": "off"}, headers=headers) for _ in range(5))
    )
    assert {answer.headers["etag"] for answer in answers} == {'"1"'}
    assert len((await client.get("/v1/offload/history")).json()["switches"]) == 1


async def test_the_history_tells_before_after_and_from_where(client: httpx2.AsyncClient) -> None:
    await client.put(URL + "fleet", json={"mode": "off"})
    await client.put(URL + "fleet", json={"mode": "observe", "stores": False})
    (new, old) = (await client.get("/v1/offload/history")).json()["switches"]
    off = {"mode": "off", "stores": True, "on_lease_expiry": "keep", "expires_at": None}
    assert (old["before"], old["after"], old["source"], old["who"]) == (None, off, "127.0.0.1", "anonymous@127.0.0.1")
    assert (new["before"], new["after"]["mode"], new["after"]["stores"]) == (off, "observe", False)


@pytest.mark.parametrize("text", ["two\nlines", "bell\x07", "\x1b[31mred", "right\u202eleft", "\ud800"])
async def test_control_characters_in_a_reason_are_refused(client: httpx2.AsyncClient, text: str) -> None:
    body = json.dumps({"mode": "off", "reason": text})
    answer = await client.put(URL + "fleet", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    if text.isascii():
        assert "control characters" in answer.json()["detail"]
        assert (await client.delete(URL + "fleet", params={"reason": text})).status_code == 422
    assert (await client.get("/v1/offload")).json()["overrides"] == []


@pytest.mark.parametrize(("wanted", "fleet", "model"), [("never", 200, 200), ("fleet", 422, 200), ("always", 422, 422)])
async def test_a_reason_is_required_where_the_settings_say_so(
    settings: Settings, make_runtime: Any, serving: Any, wanted: str, fleet: int, model: int
) -> None:
    async with serving(make_runtime(settings.model_copy(update={"require_reason": wanted}))) as client:
        for scope, code in (("fleet", fleet), ("model:m", model)):
            answer = await client.put(URL + scope, json={"mode": "off", "reason": "  "})
            assert answer.status_code == code
            if code == 422:
                assert answer.json()["type"] == "urn:kvguard:problem:reason-required"
            assert (await client.put(URL + scope, json={"mode": "off", "reason": "why"})).status_code == 200
            assert (await client.delete(URL + scope)).status_code == code
            assert (await client.delete(URL + scope, params={"reason": "why"})).status_code == (
                200 if code == 422 else 404
            )


async def test_what_the_controller_did_is_in_the_history_with_its_evidence(
    client: httpx2.AsyncClient, runtime: Runtime
) -> None:
    scope = "engine:h:8000/0"
    runtime.events.publish(
        Event(at=NOW, kind="controller", scope=scope, message="open -> bypass", evidence={"rtt": 4e-3})
    )
    runtime.events.publish(Event(at=NOW, kind="rtt", scope="fleet", message="not a deed"))
    runtime.journal.flush()
    await asyncio.sleep(0)  # the ledger's thread takes one after the other
    (entry,) = (await client.get("/v1/offload/history")).json()["switches"]
    shapes.SwitchOut.model_validate(entry)
    assert (entry["action"], entry["who"], entry["scope"], entry["mode"]) == ("controller", "kvguard", scope, None)
    assert (entry["reason"], entry["evidence"]) == ("open -> bypass", {"rtt": 0.004})


async def test_switches_and_engines_are_events(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    await poll(client)
    runtime.tick()
    await client.put(URL + "fleet", json={"mode": "off", "reason": "why"})
    await client.delete(URL + "fleet")
    hands.advance(20)
    runtime.tick()
    await poll(client)
    runtime.tick()
    runtime.tick()
    assert [(event.kind, event.message) for _, event in runtime.events.since(0)] == [
        ("engine", "engine h:8000/0 polls"),
        ("switch", "fleet: off by anonymous@127.0.0.1: why"),
        ("switch", "fleet: off cleared by anonymous@127.0.0.1"),
        ("engine", "engine h:8000/0 fell silent"),
        ("engine", "engine h:8000/0 polls again"),
    ]
