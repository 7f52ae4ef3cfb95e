"""`GET /v1/events`: server-sent events, from now on or from where a client was."""

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from guard import semconv
from guard.service.events import KEPT, Events
from guard.service.problems import Problem
from guard.service.runtime import Runtime
from guard.service.shapes import at
from guard.wire import Event

KEEP_ALIVE_SECONDS: Final = 15.0
_RECONNECT: Final = b"retry: 2000\n\n"


async def get_events(request: Request) -> Response:
    """Streams what happens. Ids are `RUN-NUMBER`; with one as `Last-Event-ID` what came after it is sent first."""
    request.app.state.tokens.who(request, "read")
    runtime: Runtime = request.app.state.runtime
    if runtime.streams >= runtime.settings.max_event_streams:
        raise Problem(503, "too many event streams: see max_event_streams", headers={"Retry-After": "5"})
    query = request.query_params
    kinds = frozenset(query.getlist("kind"))
    if unknown := kinds - frozenset(semconv.EVENT_KINDS):
        raise Problem(400, f"kind: {min(unknown)[:40]!r} is not one of {', '.join(semconv.EVENT_KINDS)}")
    last_id = request.headers.get("last-event-id") or query.get("last_event_id", "")
    start, lost = _start(runtime, last_id, _replay(query.get("replay", "0")))
    return StreamingResponse(_stream(runtime, start, lost, kinds), media_type="text/event-stream")


async def _stream(runtime: Runtime, last: int, lost: int | None, kinds: frozenset[str]) -> AsyncIterator[bytes]:
    runtime.streams += 1
    try:
        yield _RECONNECT
        if lost != 0:
            yield _encode("gap", _id(runtime, last), {"lost": lost})
        events: Events = runtime.events
        while not events.closing:
            found = await events.wait(last, KEEP_ALIVE_SECONDS)
            last = found[-1][0] if found else last
            chunks = [_event(runtime, number, item) for number, item in found if not kinds or item.kind in kinds]
            yield b"".join(chunks) or b": still here\n\n"
    finally:
        runtime.streams -= 1


def _start(runtime: Runtime, last_id: str, replay: int) -> tuple[int, int | None]:
    """The number after which to begin, and how many events the client has missed for good (None: not known)."""
    events = runtime.events
    oldest = events.last - len(events.since(0))
    if not last_id:
        return max(events.last - replay, oldest), 0
    run, _, number = last_id.rpartition("-")
    if run != runtime.run_id or not number.isdecimal() or int(number) > events.last:
        return oldest, None  # of an earlier run
    return max(int(number), oldest), max(0, oldest - int(number))


def _replay(text: str) -> int:
    if not text.isdecimal() or int(text) > KEPT:
        raise Problem(400, f"replay: not a whole number from 0 to {KEPT}")
    return int(text)


def _event(runtime: Runtime, number: int, event: Event) -> bytes:
    data = {
        "at": at(event.at),
        "kind": event.kind,
        "scope": event.scope,
        "message": event.message,
        "evidence": event.evidence,
    }
    return _encode(event.kind, _id(runtime, number), data)


def _id(runtime: Runtime, number: int) -> str:
    return f"{runtime.run_id}-{number}"


def _encode(kind: str, event_id: str, data: dict[str, Any]) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        event_id.encode(),
        kind.encode(),
        msgspec.json.encode(data, enc_hook=str),
    )
