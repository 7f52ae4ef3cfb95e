"""The kernel's own estimate for the live KV connections to a target, of any process: costs the store nothing.

Target: `host:port` of the store, which is the far end of the connections that are looked at. `netns` names a network
namespace (as `ip netns` does, or a path such as /proc/PID/ns/net) to look into; entering it needs root.

RTT here is tcpi_rtt, the kernel's smoothed one, of every connection that got an acknowledgement since the last look:
an idle one keeps the value of former times. Our own bytes raise it, so the least of them counts as idle. Walking the
kernel's table of connections costs 1 to 2 ms however few there are.
"""

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from guard.probe.endpoint import Dialer, explain, own_inodes, parse
from guard.probe.prober import Kind, Prober, Sample, Target

_ESTABLISHED: Final = 1 << 1  # TCP_ESTABLISHED
_WANT_INFO: Final = 1 << 1  # INET_DIAG_INFO
# Offsets in struct tcp_info (linux/tcp.h): tcpi_last_ack_recv is in ms, RTTs in us, the rate in bytes/s.
_LAST_ACK: Final = 56
_RTT: Final = 68
_TOTAL_RETRANS: Final = 100
_MIN_RTT: Final = 148
_DELIVERY_RATE: Final = 160
_LENGTH: Final = 168
_JIFFY: Final = 0.01  # seconds; how coarse tcpi_last_ack_recv is at CONFIG_HZ=100


class Connection(NamedTuple):
    """One connection as the kernel sees it; seconds, bytes per second."""

    cookie: int
    local_port: int
    rtt: float
    min_rtt: float
    delivery_rate: float
    retransmits: int
    last_ack: float


class TcpInfo:
    """Asks the kernel by INET_DIAG."""

    def __init__(self, dialer: Dialer, port: int, netns: str) -> None:
        import pyroute2  # here, so that its import is not counted as a probe's time

        del pyroute2
        self._dialer = dialer
        self._port = port
        self._netns = netns
        self._diag: Any = None
        self._looked: float | None = None

    def probe(self, count: int, timeout: float) -> Sample:
        """One look at all connections, whatever `count` says: the kernel has measured already."""
        del count, timeout
        try:
            found = list(self.connections())
        except OSError as error:
            self.close()
            return Sample(problem=explain(error, "ask the kernel (INET_DIAG)"))
        now = time.monotonic()
        since, self._looked = None if self._looked is None else now - self._looked, now
        fresh = [one for one in found if since is None or one.last_ack + _JIFFY <= since]
        if not fresh:
            what = (
                "no live connection to it here" if not found else "its connections have been silent since the last look"
            )
            return Sample(problem=what, facts={"connections": float(len(found))})
        facts = {
            "connections": float(len(found)),
            "min_rtt_seconds": min(one.min_rtt for one in found),
            "delivery_rate_bytes_per_second": max(one.delivery_rate for one in fresh),
            "retransmits": float(sum(one.retransmits for one in found)),
        }
        return Sample(rtts=tuple(one.rtt for one in fresh), sent=len(fresh), facts=facts)

    def connections(self) -> Iterator[Connection]:
        """The established connections to the target, without the probers' own.

        Raises:
            OSError: the kernel does not answer such questions, the namespace cannot be entered, the name is unknown.
        """
        addresses = self._dialer.addresses()
        wanted = {address[0] for _, address in addresses}
        own = own_inodes()
        if self._diag is None:
            self._diag = _diag_socket(self._netns)
        for family in sorted({family for family, _ in addresses}):
            for message in self._diag.get_sock_stats(
                family=family, states=_ESTABLISHED, extensions=_WANT_INFO, dport=self._port
            ):
                raw = message.get_attr("INET_DIAG_INFO")
                if message["idiag_dst"] in wanted and message["idiag_inode"] not in own and raw:
                    yield _connection(message, bytes(raw).ljust(_LENGTH, b"\0"))

    def close(self) -> None:
        """Closes the netlink socket."""
        diag, self._diag = self._diag, None
        if diag is not None:
            diag.close()


def _connection(message: Any, info: bytes) -> Connection:
    def number(offset: int, kind: str = "I") -> int:
        return int(struct.unpack_from(kind, info, offset)[0])

    return Connection(
        cookie=message["idiag_cookie"],
        local_port=message["idiag_sport"],
        rtt=number(_RTT) / 1e6,
        min_rtt=number(_MIN_RTT) / 1e6,
        delivery_rate=float(number(_DELIVERY_RATE, "Q")),
        retransmits=number(_TOTAL_RETRANS),
        last_ack=number(_LAST_ACK) / 1e3,
    )


def _diag_socket(name: str) -> Any:
    """pyroute2's socket for INET_DIAG, made inside the namespace; it stays there, this thread comes back."""
    from pyroute2 import DiagSocket, netns
    from pyroute2.netlink import diag

    class Message(diag.inet_diag_msg):  # type: ignore[misc]
        nla_map = (("INET_DIAG_NONE", "none"), ("INET_DIAG_MEMINFO", "cdata"), ("INET_DIAG_INFO", "cdata"))

    class Marshal(diag.MarshalDiag):  # type: ignore[misc]
        msg_map = {socket.AF_INET: Message, socket.AF_INET6: Message}  # noqa: RUF012 - as in the base

    if not name:
        made = DiagSocket()
    else:
        with open("/proc/thread-self/ns/net") as home:  # noqa: PTH123 - a namespace is entered by descriptor
            netns.setns(name, flags=0)
            try:
                made = DiagSocket()
            finally:
                netns.setns(home.fileno())
    made.set_marshal(Marshal())  # the stock one decodes sixty fields per connection, and six are needed
    made.bind()
    return made


def make(target: Target) -> Prober:
    """The prober of a target."""
    endpoint = parse(target, {})
    return TcpInfo(Dialer(endpoint, target.resolve), endpoint.port, target.text("netns"))


KIND: Final = Kind(make, frozenset({"netns"}))
