"""PING on a held connection to Redis, Valkey, or what else speaks RESP: the way of LMCache's and Mooncake's keys.

Target: `host:port`, `redis://host:port` or, with TLS, `rediss://host:port`. Keys of its own: `username`,
`password_file`, `ca_file`, `server_name`.
"""

from collections.abc import Callable
from typing import Final

from guard.probe.endpoint import TLS_OPTIONS, Dialer, parse, secret, tls_context
from guard.probe.held import HeldConnection
from guard.probe.prober import Kind, Prober, Target

DEFAULT_PORT: Final = 6379


def make(target: Target) -> Prober:
    """The prober of a target."""
    endpoint = parse(target, {"redis": DEFAULT_PORT, "rediss": DEFAULT_PORT})
    tls = tls_context(target) if endpoint.scheme == "rediss" else None
    user, password = target.text("username") or endpoint.user, secret(target, "password_file")
    words = [word for word in (user, password) if word]

    def greet(held: HeldConnection) -> str:
        if not password:
            return ""
        problem = held.exchange(encode("AUTH", *words), line("+OK"), target.timeout)
        return f"AUTH: {problem}; check password_file and username" if problem else ""

    dialer = Dialer(endpoint, target.resolve, tls, target.text("server_name"))
    return HeldConnection(dialer, encode("PING"), line("+PONG"), greet)


def encode(*words: str) -> bytes:
    """A command as an array of bulk strings."""
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def line(wanted: str) -> Callable[[bytes], str | None]:
    """Whether an answer is the one line `wanted`; another line is what is wrong, None means that more is to come."""
    whole = wanted.encode() + b"\r\n"

    def verdict(answer: bytes) -> str | None:
        if answer == whole:
            return ""
        return answer.decode("latin-1").strip()[:200] if answer.endswith(b"\r\n") else None

    return verdict


KIND: Final = Kind(make, TLS_OPTIONS | {"username", "password_file"}, lambda _: 4)
