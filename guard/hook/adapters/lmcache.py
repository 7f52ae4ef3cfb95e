"""LMCacheConnectorV1: LMCache inside vLLM's processes.

Skip. The connector takes its knowledge of a request from a load spec that its lookup leaves behind. A skip leaves one
that loads nothing and says what is known to be stored, so that the prompt is not written again. A request that comes
back from preemption must have a load spec, and its cached tokens must not exceed what vLLM computed: both are
assertions in the engine, so a refusal of such a request trims the spec.

Stores. `force_skip_save` is read when a request enters its first step; a request that was admitted before goes on
storing until it ends.
"""

import sys
from typing import Any

from guard.connectors import Capability
from guard.hook.adapters.base import Adapter
from guard.hook.adapters.stored import StoredPrefixes


class LMCacheAdapter(Adapter):
    """Adapter of the in-process LMCache connector."""

    def __init__(
        self, connector: Any, capability: Capability, stored: StoredPrefixes | None = None, hash_tokens: int = 0
    ) -> None:
        super().__init__(connector, capability, StoredPrefixes() if stored is None else stored)
        self._hash_tokens = hash_tokens
        self._before: bool | None = None

    @property
    def _engine(self) -> Any:
        return self.connector._lmcache_engine

    def skip(self, request: Any, local_tokens: int) -> bool:
        """Leaves a load spec that loads nothing and knows what is stored."""
        engine = self._engine
        known = self.stored.known(request.block_hashes, self._hash_tokens, engine._lmcache_chunk_size)
        if _preempted(request):
            known = min(known, local_tokens)
        spec = sys.modules[type(engine).__module__].LoadSpec
        engine.load_specs[request.request_id] = spec(
            vllm_cached_tokens=local_tokens, lmcache_cached_tokens=known, can_load=False
        )
        priorities = getattr(engine, "_requests_priority", None)
        if priorities is not None:
            priorities[request.request_id] = getattr(request, "priority", 0)
        return True

    def declined(self, request: Any, local_tokens: int) -> None:
        """Trims the load spec of a preempted request to what vLLM has."""
        spec = self._engine.load_specs.get(request.request_id)
        if spec is not None and _preempted(request):
            spec.lmcache_cached_tokens = min(spec.lmcache_cached_tokens, local_tokens)

    def answered(self, request: Any, local_tokens: int, matched: int) -> int:
        """Learns what the lookup found. Its reads are seen one by one in the worker, so there is no count here."""
        del local_tokens, matched
        engine = self._engine
        spec = engine.load_specs.get(request.request_id)
        hit = spec.lmcache_cached_tokens if spec is not None else 0
        chunk = engine._lmcache_chunk_size
        self.stored.learn(request.block_hashes, self._hash_tokens, chunk, hit)
        if not getattr(engine, "_max_tokens_per_load", 0):  # which would make the hit look shorter than it is
            self.stored.unlearn(request.block_hashes, self._hash_tokens, chunk, hit)
        return -1

    def stop_stores(self) -> None:
        """Requests that enter their first step now are not stored."""
        engine = self._engine
        self._before = engine.force_skip_save
        engine.force_skip_save = True

    def resume_stores(self) -> None:
        """As it was before."""
        if self._before is not None:
            self._engine.force_skip_save = self._before
            self._before = None

    def meta_built(self, meta: Any, *, stores: bool) -> None:
        """Learns from the step's stores."""
        del stores
        engine = self._engine
        for item in meta.requests:
            if item.save_spec is None or not item.save_spec.can_save:
                continue
            request = engine._unfinished_requests.get(item.req_id)
            if request is not None:
                chunk = engine._lmcache_chunk_size
                self.stored.learn(request.block_hashes, self._hash_tokens, chunk, len(item.token_ids))

    def forget(self, request_id: str) -> None:
        """Drops what a skip left for a request that ended before its first step; the connector would keep it."""
        spec = self._engine.load_specs.get(request_id)
        if spec is not None and not spec.can_load:
            del self._engine.load_specs[request_id]


def _preempted(request: Any) -> bool:
    return getattr(request.status, "name", "") == "PREEMPTED"
