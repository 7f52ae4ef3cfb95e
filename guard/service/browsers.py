"""What keeps a web page of somebody else from using a browser that can reach the service. A pure ASGI middleware.

Writes that a browser sends for another origin are refused (Fetch Metadata, else Origin). Answers carry a strict
Content-Security-Policy and are not for others to embed or to cache; a route may set headers of its own instead.
"""

from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guard.service.problems import Problem

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_SAFE: Final = frozenset(("GET", "HEAD", "OPTIONS"))


class BrowserDefence:
    """Refuses writes from other origins and adds the headers that browsers heed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, unless it is a write of another origin."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                message["headers"].extend(item for item in _HEADERS if item[0] not in there)
            await send(message)

        if scope["method"] not in _SAFE and _foreign(scope):
            detail = "a page of another origin may not write here; call the API from the console or outside a browser"
            await Problem(403, detail, kind="cross-origin").response(scope["path"])(scope, receive, sealed)
        else:
            await self._app(scope, receive, sealed)


def _foreign(scope: Scope) -> bool:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode("latin-1")
    except ValueError:  # a bracket without its other half
        return True
