"""Bounds what a client may send: bytes of body, and time for it. A pure ASGI middleware."""

import asyncio
from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TRACES_PATH: Final = "/v1/traces"
OTHER_BODY_BYTES: Final = 64 * 1024
"""Largest body of every other request."""


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
