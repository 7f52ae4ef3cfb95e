"""What vLLM is told about its KV connector: `--kv-transfer-config` and environment."""

import json
from pathlib import Path
from typing import Any

from lab.config import StackConfig


def kv_transfer(
    config: StackConfig, run_dir: Path, store: tuple[str, int], server_port: int
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The connector's configuration and the variables that go with it.

    Args:
        config: which connector, and its options.
        run_dir: where LMCache's settings file and ExampleConnector's cache go.
        store: address of Redis as this side sees it (in-process LMCache).
        server_port: port of LMCache's server (LMCacheMPConnector).
    """
    common = {"kv_role": "kv_both", "kv_load_failure_policy": config.failure_policy}
    example_extra = {"shared_storage_path": str(run_dir / "example")}
    example = {"kv_connector": "ExampleConnector", **common, "kv_connector_extra_config": example_extra}
    server_extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server_port}
    server_extra |= {"lmcache.mp.eager_prefetch": True} if config.eager_prefetch else {}
    remote = {"kv_connector": "LMCacheMPConnector", **common, "kv_connector_extra_config": server_extra}
    match config.connector:
        case "lmcache-mp":
            return remote, {}
        case "multi":
            both = {"connectors": [remote, example]}
            return {"kv_connector": "MultiConnector", **common, "kv_connector_extra_config": both}, {}
        case "example":
            return example, {}
        case "lmcache":
            settings = run_dir / "lmcache.yaml"
            _write_settings(settings, config, store)
            environment = {"LMCACHE_CONFIG_FILE": str(settings), "LAB_LMCACHE_CPU": "1"}  # the shim of lab/shim
            return {"kv_connector": "LMCacheConnectorV1", **common}, environment
    return None, {}


def _write_settings(path: Path, config: StackConfig, store: tuple[str, int]) -> None:
    """In-process LMCache's settings: no tier of its own, so that every hit is read from Redis."""
    settings = {
        "chunk_size": config.chunk_size,
        "local_cpu": False,
        "max_local_cpu_size": 1.0,
        "remote_url": f"redis://{store[0]}:{store[1]}",
        "remote_serde": "naive",
    }
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
