"""Request and answer on a connection that is held open: what the probers over TCP have in common."""

import select
import socket
import time
from collections.abc import Callable

from guard.probe.endpoint import Dialer, explain
from guard.probe.prober import Sample

CHUNK = 16 * 1024


class HeldConnection:
    """Sends `request` and reads until `complete` says how the answer was; connects again after a failure.

    `complete` gets all bytes so far and returns None (more is to come), "" (well) or what is wrong with it. `greet`
    runs on each new connection and returns what is wrong, or "".
    """

    def __init__(
        self,
        dialer: Dialer,
        request: bytes,
        complete: Callable[[bytes], str | None],
        greet: Callable[["HeldConnection"], str] = lambda _: "",
    ) -> None:
        self._dialer = dialer
        self._request = request
        self._complete = complete
        self._greet = greet
        self._sock: socket.socket | None = None

    def probe(self, count: int, timeout: float) -> Sample:
        """Round trips one after the other; the first failure ends the round, the next one connects again."""
        rtts: list[float] = []
        try:
            problem = self._open(timeout)
            while not problem and len(rtts) < count:
                start = time.perf_counter()
                problem = self.exchange(self._request, self._complete, timeout)
                if not problem:
                    rtts.append(time.perf_counter() - start)
        except OSError as error:
            problem = explain(error, "probe" if self._sock else "connect")
        if not problem:
            return Sample(rtts=tuple(rtts), sent=count)
        self.close()
        return Sample(rtts=tuple(rtts), sent=len(rtts) + 1, problem=problem)

    def exchange(self, request: bytes, complete: Callable[[bytes], str | None], timeout: float) -> str:
        """One request and its answer; returns what is wrong with the answer, or "".

        Raises:
            OSError: the connection broke, or the answer took longer than `timeout` seconds.
        """
        sock = self._sock
        if sock is None:
            raise ConnectionError("not connected")
        deadline = time.monotonic() + timeout
        sock.settimeout(timeout)
        sock.sendall(request)
        answer = b""
        while True:
            data = sock.recv(CHUNK)
            if not data:
                raise ConnectionError("closed by the other side")
            answer += data
            verdict = complete(answer)
            if verdict is not None:
                return verdict
            if len(answer) > 4 * CHUNK:
                return "answer too long for a probe"
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)

    def close(self) -> None:
        """Ends the connection."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _open(self, timeout: float) -> str:
        if self._sock is not None and (_ended(self._sock) or self._dialer.moved(self._sock.getpeername())):
            self.close()
        if self._sock is None:
            self._sock = self._dialer.connect(timeout)
            self._sock.settimeout(timeout)
            return self._greet(self)
        return ""


def _ended(sock: socket.socket) -> bool:
    """Whether the other side closed since the last round: the end of an idle connection is not a lost probe."""
    return bool(select.select([sock], [], [], 0)[0])
