"""An OTLP/HTTP receiver that keeps every span as it came in: what a user's tracing backend would be sent.

It reads with the OpenTelemetry project's own message classes and with `json`, not with kvguard's decoder, so that it
can stand as a witness beside the service.
"""

import base64
import gzip
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_STATUS_ERROR = (2, "STATUS_CODE_ERROR")


@dataclass(frozen=True, slots=True)
class SinkSpan:
    """One span. Ids are lower-case hex, empty where there is none; `resource` is that of the process that sent it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    start_ns: int
    end_ns: int
    error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


class Sink:
    """Context manager over a receiver on a free loopback port; `url` is where spans are posted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[SinkSpan] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def mark(self) -> int:
        """Number of spans so far: `spans(since=mark)` gives what came after."""
        with self._lock:
            return len(self._spans)

    def spans(self, name: str = "", *, since: int = 0, **attributes: Any) -> list[SinkSpan]:
        """Spans in their order of arrival; of one name, with these attribute values (dots written as `__`)."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        with self._lock:
            found = self._spans[since:]
        return [
            span
            for span in found
            if (not name or span.name == name) and all(span.attributes.get(k) == v for k, v in wanted.items())
        ]

    def settle(self, quiet: float = 0.6, timeout: float = 20.0) -> None:
        """Waits until no span has come for `quiet` seconds, at most `timeout`."""
        deadline = time.monotonic() + timeout
        seen, since = -1, time.monotonic()
        while time.monotonic() < deadline and (self.mark() != seen or time.monotonic() - since < quiet):
            if self.mark() != seen:
                seen, since = self.mark(), time.monotonic()
            time.sleep(0.02)

    def _take(self, body: bytes, content_type: str) -> None:
        binary = not content_type.startswith("application/json")
        request = MessageToDict(ExportTraceServiceRequest.FromString(body)) if binary else json.loads(body)
        found = list(_read(request, binary=binary))
        with self._lock:
            self._spans += found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding", "").endswith("gzip"):
                    body = gzip.decompress(body)
                sink._take(body, self.headers.get("Content-Type", ""))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _read(request: dict[str, Any], *, binary: bool) -> Iterator[SinkSpan]:
    for group in request.get("resourceSpans", ()):
        resource = _attributes(group.get("resource", {}))
        for scope in group.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield SinkSpan(
                    name=span.get("name", ""),
                    trace_id=_id(span.get("traceId", ""), binary=binary),
                    span_id=_id(span.get("spanId", ""), binary=binary),
                    parent_id=_id(span.get("parentSpanId", ""), binary=binary),
                    trace_state=span.get("traceState", ""),
                    start_ns=int(span.get("startTimeUnixNano", 0)),
                    end_ns=int(span.get("endTimeUnixNano", 0)),
                    error=span.get("status", {}).get("code") in _STATUS_ERROR,
                    attributes=_attributes(span),
                    resource=resource,
                )


def _id(text: str, *, binary: bool) -> str:
    """OTLP/JSON has ids in hex; protobuf's own JSON form, which `MessageToDict` makes, in base64."""
    if not binary or not text:
        return text
    return base64.b64decode(text).hex()


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: _value(item.get("value", {})) for item in holder.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    for key in ("stringValue", "boolValue", "doubleValue"):
        if key in value:
            return value[key]
    return value
