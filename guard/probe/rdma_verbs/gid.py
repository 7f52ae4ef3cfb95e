"""Which GID of a RoCE port to use: only RoCEv2 (UDP/IP, routable), of the family that the peer is reached by."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from .trouble import NO_GID, WRONG_GID, Trouble

ROCE_V2 = 2  # enum ibv_gid_type: InfiniBand 0, RoCE v1 1, RoCE v2 2
_KINDS = {0: "IB", 1: "RoCEv1", ROCE_V2: "RoCEv2"}


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    text: str
    kind: int

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address that the GID stands for."""
        address = ipaddress.IPv6Address(self.text)
        return address.ipv4_mapped or address

    def __str__(self) -> str:
        return f"{self.index}: {self.address} {_KINDS.get(self.kind, self.kind)}"


def choose(table: list[Gid], *, index: int | None = None, local: str = "", peer: str = "") -> Gid:
    """The GID to use: `index` where it is given; else RoCEv2 by these wishes, most important first.

    The address family of the peer's GID `peer`, the address `local` from which the peer is reached, IPv4, an address
    that is not link-local, the lowest index.

    Raises:
        Trouble: the port has no RoCEv2 GID, or none at `index`, or none of the peer's family.
    """
    if index is not None:
        for gid in table:
            if gid.index == index:
                if gid.kind != ROCE_V2:
                    raise Trouble(WRONG_GID, f"GID {gid} is not RoCEv2; the port has {_listed(table)}")
                return gid
        raise Trouble(WRONG_GID, f"the port has no GID {index}; it has {_listed(table)}")
    usable = [gid for gid in table if gid.kind == ROCE_V2]
    if not usable:
        raise Trouble(NO_GID, f"the port has no RoCEv2 GID; it has {_listed(table)}")
    if peer:
        family, link_local = Gid(0, peer, ROCE_V2).address.version, Gid(0, peer, ROCE_V2).address.is_link_local
        of_family = [gid for gid in usable if gid.address.version == family]
        if not of_family:
            raise Trouble(WRONG_GID, f"the peer uses IPv{family}, this port has {_listed(usable)}")
        usable = [gid for gid in of_family if gid.address.is_link_local == link_local] or of_family
    own = ipaddress.ip_address(local.partition("%")[0]) if local else None
    if isinstance(own, ipaddress.IPv6Address) and own.ipv4_mapped:
        own = own.ipv4_mapped
    return min(usable, key=lambda gid: (gid.address != own, gid.address.version, gid.address.is_link_local, gid.index))


def _listed(table: list[Gid]) -> str:
    return ", ".join(map(str, table)) or "none"
