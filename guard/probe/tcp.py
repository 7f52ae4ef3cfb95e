"""TCP itself: the handshake of a new connection, or an echo on a held one.

Target: `host:port`. `mode = "connect"` (default) times SYN to SYN-ACK, which any listener answers in its kernel;
`mode = "echo"` sends 16 bytes on a held connection to a server that returns them (RFC 862).
"""

from typing import Final

from guard.errors import ConfigError
from guard.probe.endpoint import Dialer, explain, parse
from guard.probe.held import HeldConnection
from guard.probe.prober import Kind, Prober, Sample, Target

_PAYLOAD: Final = b"kvguard-rtt-echo"
_CONNECT_PACKETS: Final = 7  # SYN, SYN-ACK, ACK, and the four of closing
_ECHO_PACKETS: Final = 4


class Connect:
    """Connects and closes."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    def probe(self, count: int, timeout: float) -> Sample:
        """Handshakes one after the other; the first failure ends the round."""
        rtts: list[float] = []
        for _ in range(count):
            try:
                self._dialer.connect(timeout).close()
            except OSError as error:
                return Sample(rtts=tuple(rtts), sent=len(rtts) + 1, problem=explain(error, "connect"))
            rtts.append(self._dialer.handshake)
        return Sample(rtts=tuple(rtts), sent=count)

    def close(self) -> None:
        """Nothing is held."""


def make(target: Target) -> Prober:
    """The prober of a target."""
    dialer = Dialer(parse(target, {}), target.resolve)
    if _mode(target) == "connect":
        return Connect(dialer)
    return HeldConnection(dialer, _PAYLOAD, _echoed)


def _mode(target: Target) -> str:
    mode = target.text("mode", "connect")
    if mode not in ("connect", "echo"):
        raise ConfigError("mode", f"{mode!r} is not connect or echo (target {target.target})")
    return mode


def _echoed(answer: bytes) -> str | None:
    if answer == _PAYLOAD:
        return ""
    return None if _PAYLOAD.startswith(answer) else "the answer is no echo: this is not an echo server"


KIND: Final = Kind(
    make, frozenset({"mode"}), lambda target: _CONNECT_PACKETS if _mode(target) == "connect" else _ECHO_PACKETS
)
