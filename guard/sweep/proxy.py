"""A TCP proxy that delays what passes: each byte by half a round trip in each direction, as a longer wire would.

Delays overlap: what is sent back to back arrives back to back, half a round trip later, and order is kept. Threads
rather than asyncio, because an event loop's timers are good to a millisecond only.
"""

import contextlib
import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Self

_PR_SET_TIMERSLACK: Final = 29
CHUNK: Final = 1 << 18
"""Most bytes taken at once."""

_CONNECT_SECONDS: Final = 5.0

HELD_BYTES: Final = 64 << 20
"""Most bytes on their way in one direction: 10 Gbit/s for 50 ms. Beyond it nothing is read, so the sender waits."""


class Piece(NamedTuple):
    """Bytes, the monotonic time at which they go on, and what to call then."""

    due: float
    data: bytes
    sent: Callable[[], None] | None = None


class Pipe:
    """One direction of a connection: a reader that stamps pieces with their due time, a writer that waits for it."""

    def __init__(
        self, source: socket.socket, target: socket.socket, stamp: Callable[[bytes], Iterable[Piece]], *,
        most: int = HELD_BYTES,
    ) -> None:  # fmt: skip
        self._source, self._target, self._stamp, self._most = source, target, stamp, most
        self._queue: queue.Queue[Piece] = queue.Queue()
        self._held = 0  # bytes in the queue
        self._room = threading.Condition()
        for run in (self._read, self._write):
            threading.Thread(target=run, name="kvguard-sweep-pipe", daemon=True).start()

    def _read(self) -> None:
        while data := _receive(self._source):
            for piece in self._stamp(data):
                with self._room:
                    self._room.wait_for(lambda: self._held < self._most)
                    self._held += len(piece.data)
                self._queue.put(piece)
        self._queue.put(Piece(0.0, b""))

    def _write(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: sleeps end within microseconds, not the default 50
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        while True:
            due, data, sent = self._queue.get()
            if (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            if sent:
                sent()
            try:
                if not data:
                    self._target.shutdown(socket.SHUT_WR)
                    return
                self._target.sendall(data)
            except OSError:
                for sock in (self._source, self._target):
                    sock.close()
                self._sent(self._held)  # the reader may wait for room; what it reads now is nothing
                return
            self._sent(len(data))

    def _sent(self, size: int) -> None:
        with self._room:
            self._held -= size
            self._room.notify()


class DelayProxy:
    """Listens on `listen` and passes connections on to `target`, both (host, port); port 0 takes a free one: `port`.

    It holds at most about `most` bytes of each direction of a connection.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], *, most: int = HELD_BYTES) -> None:
        self.rtt_seconds = 0.0
        self._most = most
        self._target = target
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family, backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="kvguard-sweep-proxy", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening and ends every connection."""
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=_CONNECT_SECONDS)
            except OSError:
                client.close()  # as the store itself would: the client's own handling applies
                continue
            server.settimeout(None)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open = [sock for sock in self._open if sock.fileno() >= 0] + [client, server]
            Pipe(client, server, self._delayed, most=self._most)
            Pipe(server, client, self._delayed, most=self._most)

    def _delayed(self, data: bytes) -> Iterable[Piece]:
        return (Piece(time.monotonic() + self.rtt_seconds / 2.0, data),)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(CHUNK)
    except OSError:
        return b""
