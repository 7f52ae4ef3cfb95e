"""A small GET on a held HTTP/1.1 connection: LMCache's server, stores that speak S3.

Target: `http://host[:port]/path` or `https://…`; choose a path with a small answer. Any status below 500 counts as an
answer: a refusal takes the same way. Keys of its own: `ca_file`, `server_name`, `token_file` (sent as bearer token).
"""

import re
from typing import Final

from guard import __version__
from guard.probe.endpoint import TLS_OPTIONS, Dialer, parse, secret, tls_context
from guard.probe.held import HeldConnection
from guard.probe.prober import Kind, Prober, Target

_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_CLOSES: Final = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_NO_BODY: Final = (b"204", b"304")


def make(target: Target) -> Prober:
    """The prober of a target."""
    endpoint = parse(target, {"http": 80, "https": 443})
    tls = tls_context(target) if endpoint.scheme == "https" else None
    token = secret(target, "token_file")
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    lines = [f"GET {endpoint.path or '/'} HTTP/1.1", f"Host: {host}:{endpoint.port}"]
    lines += [
        f"User-Agent: kvguard/{__version__}",
        "Accept: */*",
        *([f"Authorization: Bearer {token}"] if token else []),
    ]
    request = "\r\n".join([*lines, "", ""]).encode()
    return HeldConnection(Dialer(endpoint, target.resolve, tls, target.text("server_name")), request, complete)


def complete(answer: bytes) -> str | None:
    """Whether the response has arrived as a whole: "" yes, None not yet, else what is wrong with it."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return None
    status = _STATUS.match(head)
    if status is None:
        return "the answer is not HTTP/1.1"
    if status[1] >= b"500":
        return f"status {status[1].decode()}"
    length = _LENGTH.search(head)
    if status[1] in _NO_BODY:
        whole = True
    elif length is not None:
        whole = len(body) >= int(length[1])
    elif _CHUNKED.search(head):
        whole = body.endswith(b"0\r\n\r\n")
    else:
        return "the answer tells no length, so the connection cannot be held: use prober tcp"
    if whole and _CLOSES.search(head):
        return "the server closes after each answer, so the connection cannot be held: use prober tcp"
    return "" if whole else None


KIND: Final = Kind(make, TLS_OPTIONS | {"token_file"}, lambda _: 5)
