"""TCP proxy in front of Redis that delays traffic, or one named command, and counts commands.

It runs as a process:

    python -m lab.injector.proxy LISTEN_PORT TARGET_HOST TARGET_PORT CONTROL_SOCKET

The fallback where no TUN device may be made, and the way to lengthen one kind of read only ("attribution by
intervention"). Control, one datagram per command, answered with state and counters as `key=value`:

    rtt US          delays every byte by US/2 in each direction        bw MBPS    limit per direction and connection
    delay NAME US   delays each command NAME by US before it goes on   reset, stats

`held.NAME` counts the microseconds in which at least one command NAME was held back by such a delay, over all
connections: serial commands add up, overlapping ones count once. A client that waits for them all is delayed by it.

Delays overlap as on a wire: of N commands pipelined on one connection each waits US from its own arrival, and order is
kept. A client that waits for each answer, as LMCache's native client does, sees US per command. Threads rather than
asyncio because an event loop's timers are only good to a millisecond.
"""

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from guard.sweep.proxy import Piece, Pipe


class State:
    """What the control socket sets and reads. Plain attributes: each is written by one thread or under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rtt_us = 0
        self.bytes_per_second = 0
        self.delays_us: dict[str, int] = {}
        self.commands: Counter[str] = Counter()  # NAME, and cN.NAME of connection N
        self.counts: Counter[str] = Counter(connections=0, bytes_up=0, bytes_down=0)
        self.held: dict[str, float] = {}  # NAME -> seconds
        self._holding: Counter[str] = Counter()
        self._since: dict[str, float] = {}

    def hold(self, name: str) -> None:
        """A delayed command has come."""
        with self.lock:
            if not self._holding[name]:
                self._since[name] = time.monotonic()
            self._holding[name] += 1

    def release(self, name: str) -> None:
        """A delayed command goes on."""
        with self.lock:
            self._holding[name] -= 1
            if not self._holding[name]:
                self.held[name] = self.held.get(name, 0.0) + time.monotonic() - self._since[name]

    def handle(self, message: str) -> str:
        """Carries out one control message; returns the answer."""
        match message.split():
            case ["rtt", number]:
                self.rtt_us = int(number)
            case ["bw", number]:
                self.bytes_per_second = int(number) * 125_000
            case ["delay", name, number]:
                self.delays_us[name.upper()] = int(number)
            case ["reset"]:
                with self.lock:
                    self.commands.clear()
                    self.held.clear()
                    self.counts.update({key: -value for key, value in self.counts.items() if key != "connections"})
            case ["stats"]:
                pass
            case _:
                return "error=unknown-command"
        with self.lock:
            pairs = {"rtt_us": self.rtt_us, "bytes_per_second": self.bytes_per_second, **self.counts}
            pairs |= {f"delay.{name}": value for name, value in self.delays_us.items()}
            pairs |= {f"held.{name}": round(value * 1e6) for name, value in self.held.items()}
            pairs |= {f"command.{name}": value for name, value in self.commands.items()}
        return " ".join(f"{key}={value}" for key, value in pairs.items())


class CommandReader:
    """Cuts a client's byte stream into whole commands (RESP arrays of bulk strings, or inline lines)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yields name and bytes of each command that is complete now."""
        self._buffer += data
        while (parsed := self._parse()) is not None:
            name, end = parsed
            yield name, bytes(self._buffer[:end])
            del self._buffer[:end]

    def _parse(self) -> tuple[str, int] | None:
        line_end = self._buffer.find(b"\r\n")
        if line_end < 0:
            return None
        if self._buffer[:1] != b"*":
            words = bytes(self._buffer[:line_end]).split()
            return (words[0].decode("latin-1").upper() if words else "", line_end + 2)
        name, at = "", line_end + 2
        for index in range(int(self._buffer[1:line_end])):
            line_end = self._buffer.find(b"\r\n", at)
            if line_end < 0:
                return None
            start, size = line_end + 2, int(self._buffer[at + 1 : line_end])
            at = start + size + 2
            if len(self._buffer) < at:
                return None
            if index == 0:
                name = bytes(self._buffer[start : start + size]).decode("latin-1").upper()
        return name, at


class Direction:
    """What one direction of one connection does to what passes: counts, delays, holds back."""

    def __init__(self, state: State, number: int, *, up: bool) -> None:
        self._state, self._number, self._up = state, number, up
        self._commands = CommandReader()
        self._wire_free = 0.0

    def stamp(self, data: bytes) -> Iterator[Piece]:
        """Cuts it into commands (towards the store) and says when each may go on."""
        with self._state.lock:
            self._state.counts["bytes_up" if self._up else "bytes_down"] += len(data)
        for name, piece in self._commands.feed(data) if self._up else (("", data),):
            yield self._stamped(name, piece)

    def _stamped(self, name: str, piece: bytes) -> Piece:
        state, due = self._state, time.monotonic()
        if state.bytes_per_second:
            due = self._wire_free = max(due, self._wire_free) + len(piece) / state.bytes_per_second
        due += state.rtt_us / 2e6
        if not name:
            return Piece(due, piece)
        with state.lock:
            state.commands[name] += 1
            state.commands[f"c{self._number}.{name}"] += 1
        delay = state.delays_us.get(name, 0)
        if not delay:
            return Piece(due, piece)
        state.hold(name)
        return Piece(due + delay / 1e6, piece, lambda: state.release(name))


def serve_control(state: State, path: Path) -> None:
    """Answers control messages for ever."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(str(path))
    while True:
        message, sender = control.recvfrom(4096)
        try:
            answer = state.handle(message.decode())
        except ValueError:
            answer = "error=not-a-number"
        if sender:
            control.sendto(answer.encode(), sender)


def main(listen_port: str, target_host: str, target_port: str, control: str) -> None:
    """Accepts connections for ever."""
    state = State()
    threading.Thread(target=serve_control, args=(state, Path(control)), daemon=True).start()
    listener = socket.create_server(("127.0.0.1", int(listen_port)), backlog=128)
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((target_host, int(target_port)), timeout=5)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with state.lock:
            state.counts["connections"] += 1
            number = state.counts["connections"]
        Pipe(client, server, Direction(state, number, up=True).stamp)
        Pipe(server, client, Direction(state, number, up=False).stamp)


if __name__ == "__main__":
    main(*sys.argv[1:])
