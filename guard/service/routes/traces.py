"""`POST /v1/traces`: OTLP/HTTP in. The raw body goes to the decoder; no framework model touches it."""

from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from guard import semconv
from guard.errors import TooLargeError, WireError
from guard.ingest import otlp
from guard.service.forward import FORWARDED, Export
from guard.service.problems import Problem
from guard.service.runtime import Runtime

INLINE_BYTES: Final = 1 << 20
"""Bodies that unpack to more are decoded on a thread; 1 MiB takes the event loop some milliseconds."""

RETRY_AFTER: Final = "1"
_ENCODINGS: Final = ("", "identity", "gzip", "x-gzip", "deflate")


async def post_traces(request: Request) -> Response:
    """Takes an OTLP trace request; what it could not use is told as partial success."""
    runtime: Runtime = request.app.state.runtime
    try:
        response = await _take(request, runtime)
    except Problem as problem:
        response = problem.response(request.url.path)
    except HTTPException as error:  # of the limits
        response = Problem(error.status_code, error.detail).response(request.url.path)
    runtime.telemetry.count(semconv.INGEST_REQUESTS, str(response.status_code))
    return response


async def _take(request: Request, runtime: Runtime) -> Response:
    request.app.state.tokens.who(request, "ingest")
    content_type = request.headers.get("content-type", "")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if not otlp.accepts(content_type):
        raise Problem(415, f"content type {content_type[:60]!r}: send {otlp.PROTOBUF} or {otlp.JSON}")
    if encoding not in _ENCODINGS:
        raise Problem(415, f"content encoding {encoding[:40]!r}: send gzip, deflate or none")
    budget: Budget = request.app.state.budget
    held = 0
    try:
        chunks = []
        async for chunk in request.stream():
            held += budget.take(len(chunk))
            chunks.append(chunk)
        body = b"".join(chunks)
        export = Export(body, content_type, encoding)
        batch = await runtime.receive(export, big=_big(body, encoding), forward=FORWARDED not in request.headers)
    except TooLargeError as error:
        raise Problem(413, str(error)) from None
    except WireError as error:
        raise Problem(400, str(error)) from None
    finally:
        budget.give(held)
    answer = otlp.encode_response(batch.rejected, batch.message, content_type)
    return Response(answer, HTTPStatus.OK, media_type=otlp.media_type(content_type))


class Budget:
    """Bytes of trace bodies that may be in memory at once."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def take(self, size: int) -> int:
        """Takes `size` bytes and returns it.

        Raises:
            Problem: 503 with Retry-After when there are not so many left.
        """
        if size > self.left:
            raise Problem(503, "too many spans at once: send them again", headers={"Retry-After": RETRY_AFTER})
        self.left -= size
        return size

    def give(self, size: int) -> None:
        """Gives back what was taken."""
        self.left += size


def _big(body: bytes, encoding: str) -> bool:
    if encoding in ("gzip", "x-gzip"):
        # RFC 1952: the last 4 bytes are the size before compression, modulo 2^32. A lie costs time, not memory.
        return max(len(body), int.from_bytes(body[-4:], "little")) > INLINE_BYTES
    return len(body) > INLINE_BYTES
