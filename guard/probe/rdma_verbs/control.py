"""The TCP connection by which the two ends agree on a session: one JSON object a line, bounded in size and time."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

from .trouble import DEAD_WIRE, PEER_GONE, PROTOCOL, Trouble

DEFAULT_PORT = 18515
VERSION = 1
MAX_LINE = 4096
HANDSHAKE_SECONDS = 5.0


class Control:
    """One end of a control connection."""

    def __init__(self, sock: socket.socket, seconds: float = HANDSHAKE_SECONDS) -> None:
        self.sock = sock
        sock.settimeout(seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that has lost power must not hold a session: gone after 10 + 3 * 5 s of silence.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._held = b""

    @property
    def local(self) -> str:
        """Own IP address on this connection."""
        return str(self.sock.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Trouble(PEER_GONE, f"the peer has gone: {error}") from None

    def receive(self) -> dict[str, Any]:
        """The peer's next message; raises the `Trouble` that it reports, or that it causes."""
        try:
            while b"\n" not in self._held:
                if len(self._held) > MAX_LINE:
                    raise Trouble(PROTOCOL, f"the peer sent more than {MAX_LINE} bytes without an end of line")
                part = self.sock.recv(MAX_LINE)
                if not part:
                    raise Trouble(PEER_GONE, "the peer closed the connection")
                self._held += part
        except TimeoutError:
            raise Trouble(DEAD_WIRE, f"the peer said nothing for {self.sock.gettimeout():g} s") from None
        except OSError as error:
            raise Trouble(PEER_GONE, f"the peer has gone: {error}") from None
        line, _, self._held = self._held.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Trouble(PROTOCOL, f"the peer does not speak this protocol: {line[:60]!r}")
        if message.get("ok") is False:
            raise Trouble(*(str(message.get(key, "")) for key in ("code", "message", "hint")))
        return message

    def peer_closed(self) -> bool:
        """Whether the peer has closed the connection (or sent something, which it must not)."""
        try:
            return bool(select.select([self.sock], [], [], 0)[0])
        except (OSError, ValueError):
            return True

    def wait_closed(self) -> None:
        """Returns when the peer has closed the connection or its host stopped answering."""
        self.sock.settimeout(None)
        try:
            self.sock.recv(1)
        except OSError:
            return

    def close(self) -> None:
        """Ends the connection, which ends the session on the other side."""
        self.sock.close()


def connect(host: str, port: int, source: str = "", seconds: float = HANDSHAKE_SECONDS) -> Control:
    """Connects to a target's control port, from the local address `source` where one is given."""
    try:
        sock = socket.create_connection((host, port), seconds, (source, 0) if source else None)
    except TimeoutError:
        raise Trouble(DEAD_WIRE, f"{host}:{port} did not answer for {seconds:.3g} s") from None
    except OSError as error:
        raise Trouble(PEER_GONE, f"cannot connect to {host}:{port}: {error}") from None
    return Control(sock, seconds)


def whole(message: dict[str, Any], key: str) -> int:
    """An integer of a peer's message; raises `Trouble` where it is missing or of another type."""
    value = message.get(key)
    if not isinstance(value, int) or value < 0:
        raise Trouble(PROTOCOL, f"the peer's message has no valid {key}")
    return value
