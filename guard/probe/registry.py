"""The probers by name."""

from collections.abc import Mapping
from typing import Final

from guard.errors import ConfigError
from guard.probe import rdma, resp
from guard.probe.prober import Kind, Prober, Target

PROBERS: Final[Mapping[str, Kind]] = {"rdma": rdma.KIND, "resp": resp.KIND}


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
