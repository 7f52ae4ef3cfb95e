"""Bounds what a client may send: bytes of body and time for it (a pure ASGI middleware), and requests a second."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Self

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guard.settings import Settings

TRACES_PATH: Final = "/v1/traces"
OTHER_BODY_BYTES: Final = 64 * 1024
"""Largest body of every other request."""


BURST_SECONDS: Final = 5.0
"""A client that was quiet may send what it may send in so many seconds at once."""

MAX_CLIENTS: Final = 20_000
REFUSED: Final = "refused"
_REFUSED_PER_SECOND: Final = 5.0
"""Requests without a known token that one address may send; beyond it nobody looks at its tokens."""


class Rates:
    """Requests a second by kind and client: the generic cell rate algorithm (ITU-T I.371), one number a client."""

    def __init__(self, clock: Callable[[], float], per_second: Mapping[str, float]) -> None:
        """`clock` is monotonic; a kind that is not in `per_second`, or 0 there, is not bounded."""
        self._clock = clock
        self._spacing = {kind: 1.0 / rate for kind, rate in per_second.items() if rate > 0.0}
        self._due: dict[tuple[str, str], float] = {}

    @classmethod
    def of(cls, settings: Settings, clock: Callable[[], float]) -> Self:
        """The rates that the settings ask for."""
        rates = {"read": settings.read_rate, "admin": settings.write_rate, "ingest": settings.ingest_rate}
        return cls(clock, {**rates, REFUSED: _REFUSED_PER_SECOND})

    def take(self, kind: str, client: str) -> float:
        """Counts a request; 0 when it may go on, else the seconds after which one may."""
        spacing = self._spacing.get(kind)
        if spacing is None:
            return 0.0
        now, key = self._clock(), (kind, client)
        due = max(self._due.get(key, now), now)
        late = due - now - BURST_SECONDS
        if late > 0.0:
            return late
        self._due[key] = due + spacing
        if len(self._due) > MAX_CLIENTS:
            self._due = {key: due for key, due in self._due.items() if due > now}
            if len(self._due) > MAX_CLIENTS:
                self._due.clear()
        return 0.0


class BodyLimit:
    """Refuses a body as too large (413: unread where its length is told) or too slow (408), when it is asked for."""

    def __init__(self, app: ASGIApp, *, traces_bytes: int, seconds: float) -> None:
        self._app = app
        self._traces_bytes = traces_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with a `receive` that counts."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        limit = self._traces_bytes if scope["path"] == TRACES_PATH else OTHER_BODY_BYTES
        refuse, left, complete = _declared(scope) > limit, limit, False
        text = f"the body is larger than {limit} bytes"
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def bounded() -> Message:
            nonlocal left, complete
            if complete:
                return await receive()
            if refuse:
                raise HTTPException(413, text)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, text)
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, bounded, send)


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0
