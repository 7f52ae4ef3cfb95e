"""`/v1/directives/{engine_id}`: the long poll of the hooks, and their goodbye."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from guard import semconv
from guard.service.directives import MAX_BACKENDS, MAX_WAIT, Poll, RegistryFullError
from guard.service.offload import is_name
from guard.service.problems import Problem
from guard.service.runtime import Runtime


async def get_directives(request: Request) -> Response:
    """Answers at once when the hook has not applied what is in force, else when that changes or after `wait`."""
    request.app.state.tokens.who(request, "ingest")
    runtime: Runtime = request.app.state.runtime
    query = request.query_params
    if not query.get("schema", str(semconv.SCHEMA)).isdecimal():
        raise Problem(400, "schema: not a whole number")
    if not request.path_params["engine_id"]:
        raise Problem(400, "the path names no engine")
    poll = Poll(
        engine_id=_name("engine_id", request.path_params["engine_id"]),
        model=_name("model", query.get("model", "")),
        backends=_backends(query.getlist("backend")),
        hook=_name("hook", query.get("hook", "")),
        instance=_name("instance", query.get("instance", "")),
        applied=request.headers.get("if-none-match", "").removeprefix("W/").strip('"'),
    )
    try:
        found = await runtime.registry.poll(poll, _wait(query.get("wait", "0")))
    except RegistryFullError:
        raise Problem(503, "too many engines: see max_engines", headers={"Retry-After": "5"}) from None
    if found is None:
        return Response(status_code=304, headers={"ETag": f'"{poll.applied}"'})
    body = msgspec.json.encode(found.to_json())
    return Response(body, media_type="application/json", headers={"ETag": f'"{found.etag}"'})


async def delete_directives(request: Request) -> Response:
    """The engine ends: it is forgotten at once. With an `error` it did not mean to: it is silent, at once."""
    request.app.state.tokens.who(request, "ingest")
    runtime: Runtime = request.app.state.runtime
    error = _name("error", request.query_params.get("error", ""))
    runtime.registry.leave(request.path_params["engine_id"], error)
    return Response(status_code=204)


def _name(what: str, text: str) -> str:
    if text and not is_name(text):
        raise Problem(400, f"{what}: longer than 256 characters or not printable")
    return text


def _backends(names: list[str]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(names))
    if len(unique) > MAX_BACKENDS or not all(map(is_name, unique)):
        raise Problem(400, f"backend: more than {MAX_BACKENDS}, or one that is not a name")
    return unique


def _wait(text: str) -> float:
    try:
        wait = float(text)
    except ValueError:
        raise Problem(400, "wait: not a number of seconds") from None
    if not 0.0 <= wait < float("inf"):
        raise Problem(400, "wait: not a number of seconds")
    return min(wait, MAX_WAIT)
