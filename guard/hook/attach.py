"""Joins a connector that vLLM makes to what its process shares: its backend, its adapter, its side of the work."""

from typing import Any

from guard.connectors import FAMILY_EXAMPLE, FAMILY_LMCACHE, FAMILY_LMCACHE_MP, Capability
from guard.hook.adapters.base import Adapter
from guard.hook.adapters.example import ExampleAdapter
from guard.hook.adapters.lmcache import LMCacheAdapter
from guard.hook.adapters.lmcache_mp import LMCacheMPAdapter
from guard.hook.runtime import announce, backend_of, runtime_for
from guard.hook.scheduler import SchedulerSide
from guard.hook.worker import WorkerSide


def prepare(capability: Capability, role: Any) -> None:
    """Before the inner connector is made: puts the read log into LMCache, in worker processes."""
    if capability.reads_in_process and getattr(role, "name", "") == "WORKER":
        import guard.hook.adapters.reads as reads

        reads.install()


def attach(connector: Any, capability: Capability, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    """After the inner connector is made: joins it to the runtime of this process."""
    runtime = runtime_for(vllm_config)
    if runtime is None:
        return
    backend = backend_of(capability, connector, vllm_config, kv_cache_config)
    scheduler = getattr(role, "name", "") == "SCHEDULER"
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or backend.block_tokens
    adapter = adapter_for(connector, capability, int(hash_tokens))
    number = runtime.join(backend, scheduler=scheduler)
    connector._kvguard_failsafe = runtime.failsafe
    connector._kvguard_adapter = adapter
    connector._kvguard_leave = runtime.leave
    connector._kvguard_boot = runtime.boot
    transfer = vllm_config.kv_transfer_config
    if scheduler:
        connector._kvguard_scheduler = SchedulerSide(
            runtime.table,
            backend,
            adapter,
            runtime.current,
            key=number,
            handoff=getattr(transfer, "kv_role", "kv_both") in ("kv_producer", "kv_consumer"),
            boot=runtime.boot,
        )
        announce(runtime, backend, type(connector).__name__, str(getattr(transfer, "kv_load_failure_policy", "")))
    else:
        side = WorkerSide(runtime.recorder, runtime.scope, backend, runtime.rank, runtime.contexts)
        connector._kvguard_worker = side
        if capability.reads_in_process:
            import guard.hook.adapters.reads as reads

            reads.connect(runtime.recorder, runtime.scope, backend, runtime.rank, runtime.contexts)


def adapter_for(connector: Any, capability: Capability, hash_tokens: int) -> Adapter:
    """The adapter of a connector's family."""
    if capability.family == FAMILY_LMCACHE_MP:
        return LMCacheMPAdapter(connector, capability, hash_tokens=hash_tokens)
    if capability.family == FAMILY_LMCACHE:
        return LMCacheAdapter(connector, capability, hash_tokens=hash_tokens)
    if capability.family == FAMILY_EXAMPLE:
        return ExampleAdapter(connector, capability)
    return Adapter(connector, capability)
