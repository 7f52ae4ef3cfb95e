"""Talks to an injector (`tundelay` or `proxy`) over its Unix control socket: one datagram each way.

The socket is a file, so it is reached from any network namespace, and never travels over the link that it slows.
"""

import contextlib
import socket
import tempfile
from pathlib import Path

from lab.errors import LabError


class Injector:
    """A running injector. Every method returns its state and counters after the command."""

    def __init__(self, control: Path) -> None:
        self.control = control

    def rtt(self, microseconds: float) -> dict[str, int]:
        """Sets the round-trip time that is added (half in each direction)."""
        return self.send(f"rtt {round(microseconds)}")

    def bandwidth(self, megabits: int) -> dict[str, int]:
        """Limits each direction to so many megabits per second; 0 lifts the limit."""
        return self.send(f"bw {megabits}")

    def loss(self, per_million: int) -> dict[str, int]:
        """Drops so many packets per million (`tundelay` only)."""
        return self.send(f"loss {per_million}")

    def delay(self, command: str, microseconds: float) -> dict[str, int]:
        """Delays one Redis command, such as GET, and no other (`proxy` only); 0 ends it."""
        return self.send(f"delay {command.upper()} {round(microseconds)}")

    def reset(self) -> dict[str, int]:
        """Sets the counters to zero; RTT, limits and delays stay."""
        return self.send("reset")

    def stats(self) -> dict[str, int]:
        """State and counters."""
        return self.send("stats")

    def send(self, message: str) -> dict[str, int]:
        """Sends one command and reads the answer, `key=value` pairs.

        Raises:
            LabError: nobody answers within 5 s, or the injector does not know the command.
        """
        mine = Path(tempfile.mkdtemp(prefix="kvlab-")) / "answer"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(5)
                sock.bind(str(mine))
                sock.sendto(message.encode(), str(self.control))
                answer = sock.recv(65536).decode()
        except OSError as error:
            raise LabError(f"injector at {self.control} does not answer: {error}. Is the lab running?") from error
        finally:
            with contextlib.suppress(OSError):
                mine.unlink()
            mine.parent.rmdir()
        pairs = dict(part.split("=", 1) for part in answer.split())
        if "error" in pairs:
            raise LabError(f"injector: {pairs['error']}: {message!r}")
        return {key: int(value) for key, value in pairs.items()}
