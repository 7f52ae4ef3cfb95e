"""Where a target is: its address taken apart, names resolved once per interval, connections by IPv4 or IPv6."""

import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from guard.errors import ConfigError
from guard.probe.prober import Target

TLS_OPTIONS: Final = frozenset({"ca_file", "server_name"})
_mine: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
_lock = threading.Lock()
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


class Endpoint(NamedTuple):
    """A target's address; `scheme` is empty for plain `host:port`."""

    scheme: str
    host: str
    port: int
    path: str = ""
    user: str = ""


def parse(target: Target, schemes: dict[str, int]) -> Endpoint:
    """Takes `host:port`, `[v6]:port` or `scheme://host[:port]/path` apart; `schemes` gives each its default port.

    Raises:
        ConfigError: it is none of these, or holds a password.
    """
    text = target.target
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError("target", f"{text!r}: {error}") from None
    if parts.password is not None:
        raise ConfigError("target", "holds a password: give password_file and leave it out of the URL")
    port = port or schemes.get(parts.scheme)
    if parts.scheme not in {"", *schemes} or not host or not port:
        forms = ", ".join(["host:port", *(f"{scheme}://host[:port]" for scheme in schemes if scheme)])
        raise ConfigError("target", f"{text!r} is not an address; prober {target.prober} takes {forms}")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return Endpoint(parts.scheme, host, port, path, parts.username or "")


class Dialer:
    """Connects to an endpoint and knows when a held connection leads to a place that its name has left.

    Resolution happens at most once per `seconds`, and after a failure at most once per attempt.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        seconds: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._tls = tls
        self._server_name = server_name or endpoint.host
        self._clock = clock
        self._resolved_at = -float("inf")
        self._addresses: list[_Address] = []
        self.resolutions = 0
        self.handshake = 0.0  # seconds from SYN to SYN-ACK of the last connection

    def addresses(self) -> list[_Address]:
        """The addresses of the name, as fresh as promised.

        Raises:
            OSError: the name does not resolve.
        """
        now = self._clock()
        if now - self._resolved_at >= self._seconds or not self._addresses:
            self._resolved_at = now
            self.resolutions += 1
            found = socket.getaddrinfo(self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address) for family, _, _, _, address in found]
        return self._addresses

    def moved(self, peer: tuple[Any, ...]) -> bool:
        """Whether the name no longer leads to `peer`, a connected socket's other end."""
        try:
            return all(address[:2] != peer[:2] for _, address in self.addresses())
        except OSError:
            return False  # a name server that fails is no reason to leave a connection that works

    def connect(self, timeout: float) -> socket.socket:
        """A new connection; every step of it within `timeout` seconds. Small writes leave at once.

        Raises:
            OSError: no address answers, or TLS fails.
        """
        problem: OSError | None = None
        for family, address in self.addresses():
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                start = time.perf_counter()
                sock.connect(address)
                self.handshake = time.perf_counter() - start
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_hostname=self._server_name)
            except OSError as error:
                sock.close()
                problem = error
            else:
                with _lock:
                    _mine.add(sock)
                return sock
        self._addresses = []  # perhaps it moved: ask again before the next attempt
        raise problem or OSError("no address")


def own_inodes() -> set[int]:
    """Inodes of the probers' own connections, by which the kernel's lists tell them from those of the KV traffic."""
    with _lock:
        return {os.fstat(number).st_ino for sock in _mine if (number := sock.fileno()) >= 0}


def tls_context(target: Target) -> ssl.SSLContext:
    """TLS that checks the server's certificate, against `ca_file` if there is one.

    Raises:
        ConfigError: the file cannot be used.
    """
    ca_file = target.text("ca_file")
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("ca_file", f"{ca_file}: {error} (target {target.target})") from None


def secret(target: Target, option: str) -> str:
    """The first line of the file that an option names; empty where the option is not given.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    path = target.text(option)
    if not path:
        return ""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, f"{path}: {error} (target {target.target})") from None
    if not lines or not lines[0]:
        raise ConfigError(option, f"{path}: empty (target {target.target})")
    return lines[0]


def explain(error: OSError, doing: str) -> str:
    """A sentence for a person: what was done, and how it failed."""
    if isinstance(error, TimeoutError):
        return f"{doing}: no answer in time"
    if isinstance(error, socket.gaierror):
        return f"{doing}: the name does not resolve ({error.strerror})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{doing}: certificate not trusted ({error.verify_message}); see ca_file, server_name"
    return f"{doing}: {error.strerror or error}"
