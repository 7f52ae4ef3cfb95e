"""Names the backend of a connector, `<kind>/<store>`, and finds its address, from what vLLM's configuration tells.

The store of LMCache's multiprocess server is configured there and not in vLLM; whoever wants it in the label writes
`"kvguard.store": "resp"` into `kv_connector_extra_config`.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from guard.connectors import (
    EXAMPLE,
    LMCACHE,
    LMCACHE_MP,
    MOONCAKE_STORE,
    NIXL,
    OFFLOADING,
    UNKNOWN,
    Capability,
)

STORE_KEY: Final = "kvguard.store"
_UNSAFE: Final = re.compile(r"[^a-z0-9_.-]+")


class Place(NamedTuple):
    """A backend's label and, where known, the address that this engine talks to."""

    label: str
    address: str = ""
    port: int = 0


def place_of(capability: Capability, connector: Any, config: Any) -> Place:
    """The label and address of a connector that has been made. Never raises: what cannot be found stays out."""
    extra = _extra(config)
    kind = capability.kind
    if capability is UNKNOWN:
        kind = _clean(type(connector).__name__) or kind
    try:
        store, address, port = _FINDERS.get(capability.kind, _nothing)(connector, extra)
    except Exception:  # noqa: BLE001  foreign configuration; a label without a store still names the backend
        store, address, port = "", "", 0
    store = _clean(str(extra.get(STORE_KEY) or store))
    return Place(f"{kind}/{store}" if store else kind, address, port)


def _extra(config: Any) -> Mapping[str, Any]:
    transfer = getattr(config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None)
    return extra if isinstance(extra, Mapping) else {}


def _clean(text: str) -> str:
    return _UNSAFE.sub("-", text.lower()).strip("-")[:40]


def _split(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url if "://" in url else f"tcp://{url}")
    return parts.scheme, parts.hostname or "", parts.port or 0


_Found = tuple[str, str, int]


def _nothing(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    return "", "", 0


def _lmcache_mp(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    urls = extra.get("lmcache.mp.server_urls")
    if urls:
        url = urls[0] if isinstance(urls, list) else str(urls).split(",")[0]
    else:
        url = f"{extra.get('lmcache.mp.host', 'tcp://localhost')}:{extra.get('lmcache.mp.port', 5555)}"
    _, address, port = _split(url.strip())
    return "", address, port


def _lmcache(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    config = connector._lmcache_engine.config
    if config.remote_url:
        return _split(config.remote_url)
    return ("disk" if getattr(config, "local_disk", None) else "cpu"), "", 0


def _mooncake(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    path = os.environ.get("MOONCAKE_CONFIG_PATH", "")
    config = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    _, address, port = _split(str(config.get("master_server_address", "")))
    return str(config.get("protocol", "")), address, port


def _example(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    return "file", "", 0


def _offloading(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    return str(extra.get("spec_name", "cpu")).removesuffix("OffloadingSpec"), "", 0


def _nixl(connector: Any, extra: Mapping[str, Any]) -> _Found:  # noqa: ARG001
    backends = extra.get("backends") or ["ucx"]
    return str(backends[0]), "", 0


_FINDERS: Final = {
    LMCACHE_MP.kind: _lmcache_mp,
    LMCACHE.kind: _lmcache,
    MOONCAKE_STORE.kind: _mooncake,
    EXAMPLE.kind: _example,
    OFFLOADING.kind: _offloading,
    NIXL.kind: _nixl,
}
