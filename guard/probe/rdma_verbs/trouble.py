"""What can go wrong, as codes that stay the same, each with what to install or check."""

from __future__ import annotations

from typing import Any, Final

PYVERBS_ABSENT: Final = "pyverbs-absent"
PYVERBS_BROKEN: Final = "pyverbs-broken"
WRONG_ABI: Final = "wrong-abi"
NO_DEVICE: Final = "no-device"
PORT_DOWN: Final = "port-down"
NO_GID: Final = "no-gid"
WRONG_GID: Final = "wrong-gid"
PEER_GONE: Final = "peer-gone"
PEER_BUSY: Final = "peer-busy"
DEAD_WIRE: Final = "dead-wire"
PROTOCOL: Final = "protocol"
REFUSED: Final = "refused"
VERBS: Final = "verbs-error"

_DISTRO: Final = (
    "Debian, Ubuntu: python3-pyverbs ibverbs-providers; Fedora, RHEL: python3-pyverbs libibverbs. It comes for the "
    "distribution's own Python: name that one (e.g. /usr/bin/python3) as the probe's interpreter"
)
HINTS: Final = {
    PYVERBS_ABSENT: f"install pyverbs: {_DISTRO}",
    PYVERBS_BROKEN: f"this pyverbs does not load; a build from the Python package index often does not. Use {_DISTRO}",
    WRONG_ABI: "pyverbs must be of the same rdma-core version as libibverbs, and built for this interpreter: install "
    f"both from one source, or point LD_LIBRARY_PATH at the libibverbs that it was built with. {_DISTRO}",
    NO_DEVICE: "see `rdma link` and `ibv_devices`: is the driver loaded, the provider (ibverbs-providers) installed, "
    "/dev/infiniband visible in this container?",
    PORT_DOWN: "see `rdma link`: the port must be ACTIVE; is the cable in and the network interface up?",
    NO_GID: "the port needs a RoCEv2 GID: give its network interface an IP address, then see `ibv_devinfo -v`",
    WRONG_GID: "leave gid_index out, or take a RoCEv2 one from `ibv_devinfo -v`; both ends need an address of the same "
    "family and a route between them",
    PEER_GONE: "is `kvguard probe serve --rdma DEV` running on the target, and the port open?",
    PEER_BUSY: "the target serves as many sessions as it may: raise --sessions there",
    DEAD_WIRE: "no answer at all: check cabling, VLAN, firewall (UDP 4791 for RoCEv2) and PFC/ECN along the path",
    PROTOCOL: "is the target a `kvguard probe serve --rdma` of the same version?",
    REFUSED: "the target took the connection away or refuses the read; was it restarted?",
    VERBS: "see dmesg, `rdma link` and the locked-memory limit (ulimit -l)",
}


class Trouble(Exception):  # noqa: N818 - a result that is shown, not a bug
    """One failure: its code, what happened, and what to do about it."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint or HINTS.get(code, "")

    def as_dict(self) -> dict[str, Any]:
        """The failure as it goes over a pipe or a socket."""
        return {"ok": False, "code": self.code, "message": self.message, "hint": self.hint}
