"""Serves the console: `GET /` and `GET /assets/NAME`, from memory. `guard.service.browsers` adds the strict policy.

The page itself is public, it holds no data; what it asks for needs a token where the service has tokens.
"""

import hashlib
import mimetypes
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from guard import __version__
from guard.service.problems import Problem

INDEX: Final = "index.html"
_HEADERS: Final = {
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked for again by its tag: an upgrade shows at once
}
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}

router = APIRouter(include_in_schema=False)


class Asset:
    """One file: its bytes, media type and tag."""

    def __init__(self, name: str, content: bytes) -> None:
        suffix = name[name.rfind(".") :]
        self.content = content
        self.media_type = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _load() -> dict[str, Asset]:
    folder = resources.files(__package__) / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    files[INDEX] = files[INDEX].replace(b"{version}", __version__.encode())
    return {name: Asset(name, content) for name, content in files.items()}


ASSETS: Final = _load()


@router.get("/")
async def index(request: Request) -> Response:
    """The console."""
    return _answer(request, ASSETS[INDEX])


@router.get("/assets/{name}")
async def asset(request: Request, name: str) -> Response:
    """A file of the console; names are looked up, never opened."""
    found = ASSETS.get(name)
    if found is None or name == INDEX:
        raise Problem(404, f"the console has no file {name[:80]!r}")
    return _answer(request, found)


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "ETag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
