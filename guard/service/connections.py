"""What a connection may cost: bytes of headers, time to send them, and a place among those that are open.

uvicorn and httptools bound none of the three. A connection that waits for a request, or is slow to send one, is idle:
when there are too many connections the oldest idle one goes, so whoever opens many and says nothing loses his own.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connections:
    """The open connections of a server and what each may cost."""

    def __init__(self, *, limit: int, header_bytes: int, header_seconds: float) -> None:
        self.header_bytes = header_bytes
        self.header_seconds = header_seconds
        self._limit = limit
        self._open = 0
        self._idle: dict[BoundedProtocol, None] = {}  # oldest first

    def opened(self, one: "BoundedProtocol") -> None:
        """Takes a new connection in, and lets the oldest idle one go where there are too many."""
        self._open += 1
        self._idle[one] = None
        if self._open > self._limit:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def busy(self, one: "BoundedProtocol") -> None:
        """Its request is being answered."""
        self._idle.pop(one, None)

    def idle(self, one: "BoundedProtocol") -> None:
        """It waits for the next request."""
        self._idle[one] = None

    def closed(self, one: "BoundedProtocol") -> None:
        """It is gone."""
        self._open -= 1
        self._idle.pop(one, None)

    def protocol(self) -> type[HttpToolsProtocol]:
        """The class of protocols that belong here, as uvicorn wants it."""
        return type("Protocol", (BoundedProtocol,), {"all": self})


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol under the bounds of `Connections`."""

    all: Connections
    _timer: asyncio.TimerHandle | None = None
    _waits = True  # for the end of a request's headers
    _header_bytes = 0  # of the request that is being read
    _unread_bytes = 0  # received since the last request's headers were complete

    def connection_made(self, transport: Any) -> None:
        """Starts the clock of the first request."""
        super().connection_made(transport)
        self.all.opened(self)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the place back."""
        self._stop()
        self.all.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; a header line without end, which the parser would gather for ever, closes."""
        if self._waits and self._timer is None:
            self._start()
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._waits and self._unread_bytes > self.all.header_bytes:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Starts counting a request."""
        self._header_bytes = self._unread_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts a piece of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is in time."""
        self._stop()
        self._waits, self._unread_bytes = False, 0
        self.all.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A body is bounded elsewhere; what is left of one that was refused runs out here."""
        self._unread_bytes -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Waits for the next request, if it is not here yet; uvicorn times the wait for its first byte."""
        if not self.pipeline and not self.transport.is_closing():
            self._waits, self._unread_bytes = True, 0
            self.all.idle(self)
        super().on_response_complete()

    def _start(self) -> None:
        self._timer = self.loop.call_later(self.all.header_seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.all.header_bytes:
            raise ValueError("URL and headers are too large")  # the parser turns it into a 400 and closes
