"""Errors of the HTTP API as RFC 9457 `application/problem+json`."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

MEDIA_TYPE: Final = "application/problem+json"

log = structlog.get_logger("guard.service")


class Problem(Exception):  # noqa: N818  it is the name of the format
    """An answer that says what went wrong; `extra` members are added to the JSON object."""

    def __init__(
        self, status: int, detail: str, *, kind: str = "", headers: Mapping[str, str] | None = None, **extra: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.headers = headers
        self.extra = extra

    def response(self, path: str) -> Response:
        """The HTTP answer; `path` is where it happened."""
        title = HTTPStatus(self.status).phrase
        body = {
            "type": f"urn:kvguard:problem:{self.kind or title.lower().replace(' ', '-')}",
            "title": title,
            "status": self.status,
            "detail": self.detail,
            "instance": path,
            **self.extra,
        }
        return JSONResponse(body, self.status, headers=self.headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Makes every error of `app` a problem: ours, the framework's 404, 405 and 422, and what nobody expected."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)  # noqa: S101  the framework's types are wider
    return error.response(request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND and detail == "Not Found":
        detail = f"nothing is at {request.url.path}; see /openapi.json"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not allowed here"
    return Problem(error.status_code, detail, headers=error.headers).response(request.url.path)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101
    errors = [{"pointer": _pointer(item["loc"]), "detail": str(item["msg"])} for item in error.errors()]
    detail = "; ".join(f"{item['pointer']}: {item['detail']}" for item in errors[:3])
    return Problem(422, detail, kind="invalid-request", errors=errors).response(request.url.path)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("request_failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
    return Problem(500, "an error inside kvguard; its log has the details").response(request.url.path)


def _pointer(location: tuple[str | int, ...]) -> str:
    """JSON pointer into the body (RFC 6901), or the parameter's place and name."""
    place, *rest = location
    if place == "body":
        return "#/" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in rest)
    return "/".join(map(str, location))
