"""Stand-ins for a kvguard service that answers hooks wrongly."""

import json
import socketserver
import threading
from collections import Counter
from collections.abc import Callable
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from guard import semconv
from guard.wire import Directive, DirectiveSet

Answers = Callable[[int, str, str], bytes]
"""From the number of the request so far, its method and its target to the bytes that are sent back."""


class Misbehaving:
    """Context manager over a server on a loopback port that answers every request with `answers`."""

    def __init__(self, port: int, answers: Answers) -> None:
        self.asked: Counter[str] = Counter()
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = 20

            def handle(self) -> None:
                line = self.rfile.readline().decode("latin-1").split()
                length = 0
                while (header := self.rfile.readline().strip()) != b"":
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                self.rfile.read(length)
                if len(line) >= 2:
                    outer.asked[line[0]] += 1
                    self.wfile.write(answers(outer.asked.total(), line[0], line[1]))

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """The hook may hang up on such an answer."""

        self._server = Server(("127.0.0.1", port), Handler)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def http(status: str, body: bytes, *headers: str) -> bytes:
    """A whole HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def off(target: str, **changes: object) -> dict[str, object]:
    """A set of directives that switches reads off for whoever asked, as the service would write it, with changes."""
    parts = urlsplit(target)
    engine = unquote(parts.path.removeprefix("/v1/directives/"))
    directives = [
        Directive(id="x", engine_id=engine, backend=backend, mode=semconv.MODE_OFF, on_lease_expiry=semconv.LEASE_KEEP)
        for backend in parse_qs(parts.query)["backend"]
    ]
    return DirectiveSet(engine_id=engine, etag="x", directives=tuple(directives)).to_json() | changes


def newer(_: int, method: str, target: str) -> bytes:
    """A service of a later schema, which says `off` in words that this hook need not understand."""
    if method == "POST":
        return http("200 OK", json.dumps({"schema": semconv.SCHEMA + 1, "accepted": {"spans": "all"}}).encode())
    body = off(target, schema=semconv.SCHEMA + 1, new={"meaning": "unknown"})
    return http("200 OK", json.dumps(body).encode(), 'ETag: "x"')


def garbage(number: int, method: str, target: str) -> bytes:
    """Another kind of nonsense each time; where one says `off` it is for another engine or has no tag."""
    kinds = [
        b"\x00\xff\x13nonsense\r\n\r\n",
        b"",
        http("200 OK", b"this is not JSON"),
        http("200 OK", b"[" * 100_000),
        http("200 OK", b'{"schema": "one", "engine_id": 7, "etag": null, "directives": {}}'),
        http("200 OK", b"\xff\xfe" * 50_000, "Content-Encoding: gzip"),
        http("500 Internal Server Error", b"<html>sorry</html>"),
        http("304 Not Modified", b""),
        http("204 No Content", b""),
        http("302 Found", b"", "Location: http://127.0.0.1:1/"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
        b"HTTP/9.9 abc what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    ]
    if method == "GET":
        kinds.append(http("200 OK", json.dumps(off(target, engine_id="another/0")).encode()))
        kinds.append(http("200 OK", json.dumps(off(target, etag="")).encode()))
    return kinds[number % len(kinds)]
