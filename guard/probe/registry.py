"""The probers by name."""

from collections.abc import Mapping
from typing import Final

from guard.errors import ConfigError
from guard.probe import http, path, rdma, resp, tcp, tcpinfo
from guard.probe.prober import Kind, Prober, Target

PROBERS: Final[Mapping[str, Kind]] = {
    "rdma": rdma.KIND,
    "resp": resp.KIND,
    "http": http.KIND,
    "tcp": tcp.KIND,
    "path": path.KIND,
    "tcpinfo": tcpinfo.KIND,
}
"""In the order in which they are believed where several look at one backend: the closest to the KV traffic first, the
one that our own bytes raise last."""


def make(target: Target) -> Prober:
    """The prober of a target.

    Raises:
        ConfigError: there is no such prober, or it cannot use one of the keys; names the key.
    """
    kind = PROBERS.get(target.prober)
    if kind is None:
        raise ConfigError("prober", f"{target.prober!r} is not one of {', '.join(PROBERS)} (target {target.target})")
    unknown = sorted(set(target.options) - kind.options)
    if unknown:
        known = ", ".join(sorted(kind.options)) or "none"
        raise ConfigError(unknown[0], f"unknown key for prober {target.prober}; its own are {known} ({target.target})")
    return kind.make(target)
