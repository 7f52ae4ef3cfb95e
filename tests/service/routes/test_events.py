"""`GET /v1/events`: the stream, where it begins, and its bounds."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from guard.service.routes import events as module
from guard.service.runtime import Runtime
from guard.wire import Event


def event(number: int, kind: str = "rtt") -> Event:
    return Event(at=1_800_000_000.0, kind=kind, scope="fleet", message=f"line\n{number}", evidence={"n": number})


def parse(chunk: bytes) -> list[tuple[str, str, Any]]:
    """(id, event, data) of each block that is an event."""
    found = []
    for block in chunk.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "event" in fields:
            found.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return found


async def first(runtime: Runtime, last_id: str = "", replay: int = 0, kinds: tuple[str, ...] = ()) -> Any:
    """The stream's events until it would wait."""
    runtime.end_waits()
    runtime.events.closing = False
    start, lost = module._start(runtime, last_id, replay)
    stream = module._stream(runtime, start, lost, frozenset(kinds))
    text = await anext(stream) + await anext(stream)
    if lost != 0:
        text += await anext(stream)
    await stream.aclose()
    return parse(text)


@pytest.mark.anyio
async def test_it_begins_now_or_with_the_last_ones_or_where_the_client_was(runtime: Runtime) -> None:
    for number in range(1, 6):
        runtime.events.publish(event(number, "switch" if number % 2 else "rtt"))
    run = runtime.run_id
    assert [item[0] for item in await first(runtime, replay=2)] == [f"{run}-4", f"{run}-5"]
    assert [item[0] for item in await first(runtime, replay=100)] == [f"{run}-{n}" for n in range(1, 6)]
    assert [item[0] for item in await first(runtime, last_id=f"{run}-3")] == [f"{run}-4", f"{run}-5"]
    assert [item[1] for item in await first(runtime, replay=5, kinds=("switch",))] == ["switch"] * 3
    (last,) = await first(runtime, last_id=f"{run}-4")
    assert last == (f"{run}-5", "switch", {
        "at": "2027-01-15T08:00:00Z", "kind": "switch", "scope": "fleet", "message": "line\n5", "evidence": {"n": 5},
    })  # fmt: skip


@pytest.mark.anyio
async def test_what_was_missed_for_good_is_told(runtime: Runtime) -> None:
    for number in range(1, 2011):
        runtime.events.publish(event(number))
    run = runtime.run_id
    found = await first(runtime, last_id=f"{run}-3")
    assert found[0] == (f"{run}-10", "gap", {"lost": 7})
    assert (found[1][0], len(found)) == (f"{run}-11", 2001)
    for stranger in ("abc-3", f"{run}-99999", "nonsense", "-"):
        assert (await first(runtime, last_id=stranger))[0] == (f"{run}-10", "gap", {"lost": None})


@pytest.mark.anyio
@pytest.mark.parametrize("query", ["kind=rain", "replay=-1", "replay=x", "replay=2001"])
async def test_what_cannot_be_is_a_problem(client: httpx2.AsyncClient, query: str) -> None:
    answer = await client.get(f"/v1/events?{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")


@contextlib.contextmanager
def listening(url: str, query: str = "", **headers: str) -> Iterator[Iterator[str]]:
    with httpx2.stream("GET", f"{url}/v1/events{query}", headers=headers, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.iter_lines()


def until(lines: Iterator[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_a_switch_is_told_at_once_and_a_client_goes_on_where_it_was(serve: Callable[..., Any]) -> None:
    served = serve(KVGUARD_SERVE_MAX_EVENT_STREAMS="2")

    def switch(mode: str) -> None:
        assert httpx2.put(f"{served.url}/v1/offload/fleet", json={"mode": mode}).status_code == 200

    with listening(served.url, "?kind=switch") as lines, listening(served.url) as _:
        assert until(lines, "retry") == "retry: 2000"
        refused = httpx2.get(f"{served.url}/v1/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        switch("off")
        last = until(lines, "id").removeprefix("id: ")
        assert json.loads(until(lines, "data").removeprefix("data: "))["message"].startswith("fleet: off by")
    switch("on")
    switch("observe")
    for _ in range(100):  # the places are free once the server has noticed
        with contextlib.suppress(AssertionError), listening(served.url, **{"Last-Event-ID": last}) as lines:
            messages = [json.loads(until(lines, "data").removeprefix("data: "))["message"] for _ in range(2)]
            break
    assert [text.split(" by ")[0] for text in messages] == ["fleet: on", "fleet: observe"]
    with listening(served.url) as lines:
        until(lines, "retry")
        assert served.stop() == 0  # a stream does not hold up the end
