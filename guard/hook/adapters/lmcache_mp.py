"""LMCacheMPConnector, LMCache's class and vLLM's `...Upstream`: told apart by what their request trackers hold.

Skip. The connector keeps a tracker per request and dies without one (an assertion in the engine), so a skip makes the
tracker and, where the state exists, sets it to BYPASS_LMCACHE as the connector does itself after a failed load. The
tracker would then store the whole prompt again: it is told what is known to be stored. With `lmcache.mp.eager_prefetch`
the lookup starts in `on_new_request`, and so does the skip.

Stores. `_can_store` is off while the metadata of a step is built; afterwards it is as before, since the connector also
answers with it who frees the blocks. vLLM's class has no such switch: there the STORE entries are taken out.

Round trips. LMCache's server asks the store for every whole chunk of the prompt (EXISTS) and prefetches those that
match (GET) while the lookup runs. The count below is that of an empty L1 cache in front of the store.
"""

from collections.abc import Collection
from typing import Any

from guard.connectors import Capability
from guard.hook.adapters.base import Adapter
from guard.hook.adapters.stored import StoredPrefixes


class LMCacheMPAdapter(Adapter):
    """Adapter of the multiprocess LMCache connector."""

    def __init__(
        self, connector: Any, capability: Capability, stored: StoredPrefixes | None = None, hash_tokens: int = 0
    ) -> None:
        super().__init__(connector, capability, StoredPrefixes() if stored is None else stored)
        self._hash_tokens = hash_tokens
        self._requests: dict[str, Any] = {}
        self._chunk = 0
        self._stopped = False

    def lookup_starts_early(self, request: Any) -> bool:
        """True with `lmcache.mp.eager_prefetch`, but for resumable requests, as the connector has it."""
        return bool(getattr(self.connector, "_eager_prefetch", False)) and not getattr(request, "resumable", False)

    def skip(self, request: Any, local_tokens: int) -> bool:
        """Primes the tracker: bypass the lookup, count the local hit, store only what is not known to be stored."""
        tracker = self.connector._get_or_create_request_tracker(request)
        known = self._known(request)
        if hasattr(tracker, "num_stored_tokens"):
            align = getattr(self.connector, "_hit_alignment_tokens", 1) or 1
            tracker.num_vllm_hit_tokens = local_tokens // align * align
            tracker.num_stored_tokens = known
            bypass = getattr(type(tracker.state), "BYPASS_LMCACHE", None)
            if bypass is not None:
                tracker.state = bypass
        elif hasattr(tracker, "num_stored_blocks"):
            block = self.connector.vllm_block_size
            tracker.num_vllm_hit_blocks = local_tokens // block
            tracker.num_stored_blocks = known // block
        else:
            return False
        self._requests[request.request_id] = request
        return True

    def answered(self, request: Any, local_tokens: int, matched: int) -> int:
        """Learns what the lookup found; returns the store operations that it asked for with an empty L1."""
        del local_tokens, matched
        self._requests[request.request_id] = request
        tracker = self.connector.request_trackers.get(request.request_id)
        chunk = self._chunk_tokens()
        if tracker is None or not chunk:
            return -1
        hit = getattr(tracker, "num_lmcache_hit_tokens", None)
        if hit is None:
            hit = tracker.num_lmcache_hit_blocks * self.connector.vllm_block_size
        hashes = request.block_hashes
        self.stored.learn(hashes, self._hash_tokens, chunk, hit)
        self.stored.unlearn(hashes, self._hash_tokens, chunk, hit)
        reserve = bool(getattr(self.connector, "_reserve_last_token_for_lookup", False))
        asked = (request.num_tokens - reserve) // chunk
        return int(asked + hit // chunk)

    def stop_stores(self) -> None:
        """Turns `_can_store` off for the time in which the step's metadata is built."""
        connector = self.connector
        if getattr(connector, "_can_store", False):
            connector._can_store = False
            self._stopped = True

    def resume_stores(self) -> None:
        """Turns it on again: `request_finished` answers with it who frees the blocks."""
        if self._stopped:
            self._stopped = False
            self.connector._can_store = True

    def meta_built(self, meta: Any, *, stores: bool) -> None:
        """Learns from the step's stores, or takes them out where the class has no switch."""
        if not meta.requests:
            return
        if not stores and not hasattr(self.connector, "_can_store"):
            meta.requests = [item for item in meta.requests if item.direction != "STORE"]
        chunk = self._chunk_tokens()
        for item in meta.requests:
            request = self._requests.get(item.request_id) if item.direction == "STORE" else None
            if request is not None:
                self.stored.learn(request.block_hashes, self._hash_tokens, chunk, item.op.end)

    def forget(self, request_id: str) -> None:
        """Drops the request object."""
        self._requests.pop(request_id, None)

    def pending_stores(self) -> dict[str, int]:
        """Stores whose futures are open on this rank; tokens from the step's metadata, 0 once it has gone."""
        futures = self.connector.worker_adapter.store_futures
        if not futures:
            return {}
        meta = getattr(self.connector, "_connector_metadata", None)
        sizes: dict[str, int] = {}
        for item in meta.requests if meta is not None else ():
            if item.direction == "STORE":
                sizes[item.request_id] = item.op.end - item.op.start
        return {request_id: sizes.get(request_id, 0) for request_id in futures}

    def failed_loads(self) -> Collection[str]:
        """What the worker's adapter notes; it keeps the names for longer than one step."""
        return getattr(self.connector.worker_adapter, "_failed_request_ids", ())

    def _known(self, request: Any) -> int:
        return self.stored.known(request.block_hashes, self._hash_tokens, self._chunk_tokens())

    def _chunk_tokens(self) -> int:
        if not self._chunk:
            adapter = self.connector.scheduler_adapter
            self._chunk = getattr(adapter, "lmcache_tokens_per_chunk", 0) or (
                adapter.num_blocks_per_chunk() * self.connector.vllm_block_size
            )
        return self._chunk
