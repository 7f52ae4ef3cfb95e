"""HTTP/1.1 to the kvguard service: keep-alive, time limits, size limits, failover. Drain threads only.

Building a TLS context and importing `ssl` are slow and hold the GIL, so both happen when the hook is built, before
serving starts.
"""

import contextlib
import encodings.idna  # noqa: F401  looking up a host name imports it
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from guard import __version__
from guard.hook.config import HookConfig
from guard.hook.failsafe import logger
from guard.hook.outages import RETRY_AFTER_LIMIT

CONNECT_TIMEOUT: Final = 3.0
_CHUNK: Final = 1 << 16


class Reply(NamedTuple):
    """What the service answered. `retry_after` in seconds, None when it did not say."""

    status: int
    body: bytes
    retry_after: float | None = None


class Transport(Protocol):
    """Sends one request at a time. Every failure to get a whole answer is an OSError."""

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        """Sends to the current endpoint; `timeout` in seconds for the whole answer, `limit` in bytes for its body."""
        ...

    def failover(self) -> None:
        """Turns to the next endpoint."""
        ...

    def close(self) -> None:
        """Closes the connection; the next request opens one. For the thread that sends."""
        ...

    def abort(self) -> None:
        """Makes a request that is under way on another thread fail now."""
        ...


class Token:
    """The bearer token in a file, read again when the file changes. No file, no token: no header."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._headers: dict[str, str] = {}

    def headers(self) -> Mapping[str, str]:
        """The `Authorization` header for the next request, or nothing."""
        if self._path is None:
            return {}
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                token = self._path.read_bytes()[:8192].decode("ascii", "replace").strip()
                usable = token.isascii() and token.isprintable() and " " not in token and token != ""
                if not usable:
                    logger.warning("kvguard: KVGUARD_TOKEN_FILE holds no usable token; none is sent")
                self._headers = {"Authorization": f"Bearer {token}"} if usable else {}
                self._stamp = stamp
        except OSError:
            pass  # being rotated or not mounted yet: keep what was read last
        return self._headers


class HttpTransport:
    """`Transport` over `http.client`, one kept-alive connection."""

    def __init__(self, config: HookConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = [urlsplit(url) for url in config.endpoints]
        self._index = 0
        self._token = Token(config.token_file)
        self._clock = clock
        self._tls = _tls(config.ca_file) if any(url.scheme == "https" for url in self._endpoints) else None
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        """Sends to the current endpoint; see `Transport.send`."""
        self._aborted = False
        reused = self._connection is not None
        try:
            return self._try(method, path, headers, body, timeout, limit)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not reused or self._aborted:
                raise
        # The service may have closed an idle connection just before: that says nothing about its health.
        return self._try(method, path, headers, body, timeout, limit)

    def failover(self) -> None:
        """Turns to the next endpoint."""
        self.close()
        self._index = (self._index + 1) % len(self._endpoints)

    def close(self) -> None:
        """Closes the connection; the next request opens one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Makes a request that is under way on another thread fail now."""
        self._aborted = True
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):  # already gone
                sock.shutdown(socket.SHUT_RDWR)

    def _try(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        try:
            return self._exchange(method, path, headers, body, timeout, limit)
        except OSError:
            self.close()
            raise
        except (http.client.HTTPException, ValueError, AttributeError) as error:
            # Not HTTP; or `abort` took a TLS socket away under the reader, which surfaces as one of the last two.
            self.close()
            raise OSError(f"not HTTP that can be read: {type(error).__name__}") from error

    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        deadline = self._clock() + timeout
        connection = self._connect()
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        prefix = self._endpoints[self._index].path
        connection.request(
            method, prefix + path, body=body,
            headers={"User-Agent": f"kvguard-hook/{__version__}", **self._token.headers(), **headers},
        )  # fmt: skip
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        response = connection.getresponse()
        parts: list[bytes] = []
        size = 0
        while chunk := response.read1(_CHUNK):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise OSError(f"the answer is larger than {limit} bytes")
            if self._clock() > deadline:
                raise TimeoutError("the answer trickles in too slowly")
        if response.length:
            raise ConnectionError("the answer was cut short")
        response.close()  # the answer, not the connection
        if response.will_close:
            self.close()
        return Reply(response.status, b"".join(parts), _retry_after(response.getheader("Retry-After")))

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            url = self._endpoints[self._index]
            host = url.hostname or ""
            if url.scheme == "https":
                self._connection = http.client.HTTPSConnection(
                    host, url.port, timeout=CONNECT_TIMEOUT, context=self._tls
                )
            else:
                self._connection = http.client.HTTPConnection(host, url.port, timeout=CONNECT_TIMEOUT)
        return self._connection


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ValueError) as error:
        logger.warning("kvguard: KVGUARD_CA_FILE cannot be used (%s); the system's authorities are used", error)
        return ssl.create_default_context()


def _retry_after(value: str | None) -> float | None:
    """Seconds from a `Retry-After` header. Its date form would need the service's clock: 1 s stands for it."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value), RETRY_AFTER_LIMIT)
    return 1.0
