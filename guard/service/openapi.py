"""The OpenAPI document: what the framework finds, the plain routes, examples, and problems as they are sent."""

from typing import Any, Final

from fastapi import FastAPI

from guard import semconv
from guard.service import problems
from guard.service.events import KEPT

_PROBLEM_SCHEMA: Final = {
    "type": "object",
    "description": "RFC 9457; further members by type, such as `errors` with a JSON pointer and a detail each.",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": {"type": "string", "description": "urn:kvguard:problem:KIND"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what is wrong and what to do, for people"},
        "instance": {"type": "string"},
    },
    "examples": [
        {
            "type": "urn:kvguard:problem:precondition-failed",
            "title": "Precondition Failed",
            "status": 412,
            "detail": 'the switch changed meanwhile: it is now "8"',
            "instance": "/v1/offload/fleet",
        }
    ],
}
_PROBLEM: Final = {
    "description": "RFC 9457 problem",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_OVERRIDE: Final = {
    "scope": "fleet", "mode": "off", "stores": True, "on_lease_expiry": "keep", "ttl_seconds": 1800.0,
    "expires_at": "2026-12-01T10:30:00Z", "reason": "INC-1234: store fails over", "who": "ann",
    "since": "2026-12-01T10:00:00Z", "etag": '"8"',
}  # fmt: skip
_SWITCHED: Final = {
    "scope": "fleet", "override": _OVERRIDE, "engines": 2, "shadowed": 0, "acknowledged": ["gpu7:8000/0"],
    "pending": ["gpu8:8000/0"],
}  # fmt: skip
_AFTER: Final = {"mode": "off", "stores": True, "on_lease_expiry": "keep", "expires_at": 1796121000.0}
EXAMPLES: Final[dict[tuple[str, str], Any]] = {
    ("/v1/offload/{scope}", "get"): _OVERRIDE,
    ("/v1/offload/{scope}", "put"): _SWITCHED,
    ("/v1/offload/{scope}", "delete"): {**_SWITCHED, "override": None},
    ("/v1/offload/history", "get"): {
        "switches": [
            {
                "id": 9, "at": "2026-12-01T10:02:11Z", "action": "controller", "scope": "engine:gpu8:8000/0",
                "who": "kvguard", "source": "", "reason": "open -> bypass: remote reads lose", "mode": None,
                "stores": None, "on_lease_expiry": None, "expires_at": None, "before": None, "after": None,
                "evidence": {"rtt_seconds": 0.0041, "n": 212},
            },
            {
                "id": 8, "at": "2026-12-01T10:00:00Z", "action": "set", "scope": "fleet", "who": "ann",
                "source": "10.0.0.9", "reason": "INC-1234: store fails over", **_AFTER,
                "expires_at": "2026-12-01T10:30:00Z", "before": None, "after": _AFTER, "evidence": None,
            },
        ],
        "next_before": None,
    },
    ("/v1/requests", "get"): {
        "requests": [
            {
                "internal_id": "cmpl-7f3a-0-1b2c3d4e", "request_id": "cmpl-7f3a-0",
                "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "engine_id": "gpu7:8000/0", "model": "llama-70b",
                "backend": "lmcache-mp/resp", "class": "8k-16k/c5-16", "arrival": "2026-12-01T10:00:00.120000+00:00",
                "decision": "remote", "reason": "mode on", "aborted": False, "simulated": False,
                "ttft_seconds": 1.92,
                "tokens": {
                    "prompt": 9000, "local": 256, "remote_matched": 8192, "remote_loaded": 8192, "computed": 552,
                    "output": 210,
                },
                "miss_latency_seconds": 1.51, "exposed_wait_seconds": 1.51,
                "parts": {
                    "intake": 0.001, "queue": 0.02, "lookup": 1.5, "slot": 0.004, "fetch": 0.006, "resume": 0.01,
                    "prefill": 0.379,
                },
                "failed_fetches": 0, "source": "measured",
            }
        ],
        "next_cursor": "WyJsYXRlc3QiLDEsIjAwIl0",
    },
}  # fmt: skip
"""By path and method: the example of the answer, which a test holds against its model."""


def document(app: FastAPI) -> None:
    """Makes the OpenAPI document of `app` tell what the framework does not know."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        schemas = document["components"]["schemas"]
        schemas["Problem"] = _PROBLEM_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):  # ours are problems
            schemas.pop(name, None)
        document["paths"].update(_PLAIN)
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if method in ("get", "put", "post", "delete"):
                    _complete(operation, EXAMPLES.get((path, method)))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any], example: Any) -> None:
    responses = operation["responses"]
    responses["default"] = _PROBLEM
    responses.pop("422", None)  # the framework's; part of the default
    if example is not None:
        responses["200"]["content"]["application/json"]["example"] = example


def _query(name: str, kind: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": kind}}


_PLAIN: Final[dict[str, Any]] = {
    "/v1/traces": {
        "post": {
            "tags": ["ingest"],
            "summary": "OTLP/HTTP traces",
            "description": "ExportTraceServiceRequest, protobuf or JSON; plain, gzip or deflate. Needs scope ingest.",
            "operationId": "post_traces",
            "requestBody": {"required": True, "content": {"application/x-protobuf": {}, "application/json": {}}},
            "responses": {
                "200": {"description": "ExportTraceServiceResponse; partial success tells of rejected spans"},
            },
        }
    },
    "/v1/events": {
        "get": {
            "tags": ["events"],
            "summary": "Server-sent events",
            "description": "What happens, as it happens: switches, engines that come and go, changes of the controller,"
            " crossings of departure and break-even, shifts of RTT. `data` is JSON: at, kind, scope, message, evidence."
            " An event `gap` tells that some were missed for good. A comment every 15 s keeps the connection. Needs"
            " scope read.",
            "operationId": "get_events",
            "parameters": [
                {
                    "name": "kind",
                    "in": "query",
                    "description": "only these; repeated",
                    "schema": {"type": "array", "items": {"type": "string", "enum": list(semconv.EVENT_KINDS)}},
                },
                {
                    **_query("replay", "integer", "begin with so many of the last events"),
                    "schema": {"type": "integer", "minimum": 0, "maximum": KEPT, "default": 0},
                },
                _query("last_event_id", "string", "where the header cannot be sent"),
                {
                    "name": "Last-Event-ID",
                    "in": "header",
                    "schema": {"type": "string"},
                    "description": "go on after this event",
                },
            ],
            "responses": {
                "200": {
                    "description": "the stream",
                    "content": {
                        "text/event-stream": {
                            "schema": {"type": "string"},
                            "example": 'id: 19a8-7\nevent: switch\ndata: {"at":"2026-12-01T10:00:00Z","kind":"switch",'
                            '"scope":"fleet","message":"fleet: off by ann","evidence":{"mode":"off"}}\n\n',
                        }
                    },
                },
            },
        }
    },
    "/v1/directives/{engine_id}": {
        "get": {
            "tags": ["directives"],
            "summary": "Long poll of a hook",
            "description": "If-None-Match is the tag of the set that the hook has applied: it acknowledges that set,"
            " and the answer waits until another is in force. Registers the engine. Needs scope ingest.",
            "operationId": "get_directives",
            "parameters": [
                {"name": "engine_id", "in": "path", "required": True, "schema": {"type": "string"}},
                _query("wait", "number", "longest wait, seconds; at most 5"),
                _query("schema", "integer", "newest directive schema that the hook reads"),
                _query("backend", "string", "repeated: the backends of the engine"),
                _query("model", "string", "name of the model"),
                _query("hook", "string", "version of the hook"),
                _query("instance", "string", "vLLM's scrape address"),
            ],
            "responses": {
                "200": {"description": "DirectiveSet with ETag", "content": {"application/json": {}}},
                "304": {"description": "nothing new; renews the lease"},
            },
        },
        "delete": {
            "tags": ["directives"],
            "summary": "Goodbye of a hook",
            "description": "The engine ends: it is forgotten at once. With an error it is kept as silent until it polls"
            " again or engine_retention_seconds have passed. Needs scope ingest.",
            "operationId": "delete_directives",
            "parameters": [
                {"name": "engine_id", "in": "path", "required": True, "schema": {"type": "string"}},
                _query("error", "string", "name of the exception that ended the engine, where that was not planned"),
            ],
            "responses": {"204": {"description": "it is noted, or was not known"}},
        },
    },
}
