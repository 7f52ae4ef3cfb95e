"""Skips that leave each connector whole, stores that stop and start, and a memory that prevents rewrites."""

import enum
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from guard.connectors import EXAMPLE, LMCACHE, LMCACHE_MP
from guard.hook.adapters.example import ExampleAdapter
from guard.hook.adapters.lmcache import LMCacheAdapter
from guard.hook.adapters.lmcache_mp import LMCacheMPAdapter
from guard.hook.adapters.stored import StoredPrefixes
from tests.hook.fakes_vllm import FakeRequest, FakeStatus


def hashes(text: str) -> list[bytes]:
    """One chained hash per letter: a prefix keeps its hashes whatever follows."""
    return [text[: index + 1].encode() for index in range(len(text))]


def test_a_prefix_is_known_up_to_the_last_chunk_that_was_seen() -> None:
    stored = StoredPrefixes(100)
    stored.learn(hashes("abcdef"), 128, 256, 512)  # two chunks of two hashes each
    assert stored.known(hashes("abcdef"), 128, 256) == 512
    assert stored.known(hashes("abcdxx"), 128, 256) == 512
    assert stored.known(hashes("abxxxx"), 128, 256) == 256
    assert stored.known(hashes("xbcdef"), 128, 256) == 0
    assert stored.known(hashes("a"), 128, 256) == 0


def test_a_lookup_that_ends_earlier_makes_it_forget_the_rest() -> None:
    stored = StoredPrefixes(100)
    stored.learn(hashes("abcdef"), 128, 256, 768)
    stored.unlearn(hashes("abcdef"), 128, 256, 256)
    assert stored.known(hashes("abcdef"), 128, 256) == 256


def test_it_knows_nothing_where_chunks_and_hashes_do_not_align() -> None:
    stored = StoredPrefixes(100)
    stored.learn(hashes("abcdef"), 100, 256, 512)
    stored.unlearn(hashes("abcdef"), 0, 256, 0)
    assert stored.known(hashes("abcdef"), 100, 256) == 0
    assert len(stored) == 0


def test_it_is_bounded_and_forgets_what_was_not_used_longest() -> None:
    stored = StoredPrefixes(3)
    stored.learn(hashes("ab"), 1, 1, 2)
    stored.learn(hashes("cd"), 1, 1, 2)
    assert len(stored) == 3
    assert stored.known(hashes("ab"), 1, 1) == 0  # its first chunk went
    assert stored.known(hashes("cd"), 1, 1) == 2


class State(enum.Enum):
    PREFETCHING = enum.auto()
    READY = enum.auto()
    BYPASS_LMCACHE = enum.auto()


@dataclass
class Tracker:
    state: State = State.PREFETCHING
    num_stored_tokens: int = 0
    num_vllm_hit_tokens: int = 0
    num_lmcache_hit_tokens: int = 0


class UpstreamState(enum.Enum):
    PREFETCHING = enum.auto()
    READY = enum.auto()


@dataclass
class UpstreamTracker:
    state: UpstreamState = UpstreamState.PREFETCHING
    num_stored_blocks: int = 0
    num_vllm_hit_blocks: int = 0
    num_lmcache_hit_blocks: int = 0


@dataclass
class MPConnector:
    tracker: type = Tracker
    vllm_block_size: int = 128
    _hit_alignment_tokens: int = 128
    _eager_prefetch: bool = False
    scheduler_adapter: Any = field(default_factory=lambda: SimpleNamespace(lmcache_tokens_per_chunk=256))
    request_trackers: dict[str, Any] = field(default_factory=dict)

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        return self.request_trackers.setdefault(request.request_id, self.tracker())


def store_item(request_id: str, end: int) -> SimpleNamespace:
    return SimpleNamespace(direction="STORE", request_id=request_id, op=SimpleNamespace(start=0, end=end))


def test_lmcache_mp_skip_bypasses_and_does_not_rewrite_what_is_stored() -> None:
    connector = MPConnector()
    adapter = LMCacheMPAdapter(connector, LMCACHE_MP, hash_tokens=128)
    first = FakeRequest("a", block_hashes=hashes("abcdefgh"), num_prompt_tokens=8 * 128)
    assert adapter.skip(first, 0)
    assert connector.request_trackers["a"] == Tracker(State.BYPASS_LMCACHE, 0, 0, 0)  # new: will be stored
    adapter.meta_built(SimpleNamespace(requests=[store_item("a", 1024)]), stores=True)
    again = FakeRequest("b", block_hashes=hashes("abcdefgh"), num_prompt_tokens=8 * 128)
    assert adapter.skip(again, 300)
    assert connector.request_trackers["b"] == Tracker(State.BYPASS_LMCACHE, 1024, 256, 0)
    longer = FakeRequest("c", block_hashes=hashes("abcdefghxy"), num_prompt_tokens=10 * 128)
    adapter.skip(longer, 0)
    assert connector.request_trackers["c"].num_stored_tokens == 1024  # only the new end is stored


def test_lmcache_mp_lookups_teach_and_count_the_stores_operations() -> None:
    connector = MPConnector()
    adapter = LMCacheMPAdapter(connector, LMCACHE_MP, hash_tokens=128)
    request = FakeRequest("a", block_hashes=hashes("abcdefgh"), num_prompt_tokens=1100)
    connector.request_trackers["a"] = Tracker(num_lmcache_hit_tokens=512)
    assert adapter.answered(request, 0, 512) == 4 + 2  # 4 whole chunks asked for, 2 fetched
    assert adapter.stored.known(request.block_hashes, 128, 256) == 512
    connector.request_trackers["a"] = Tracker(num_lmcache_hit_tokens=0)
    assert adapter.answered(request, 0, 0) == 4
    assert adapter.stored.known(request.block_hashes, 128, 256) == 0


def test_lmcache_mp_of_vllm_counts_in_blocks_and_has_no_bypass() -> None:
    connector = MPConnector(tracker=UpstreamTracker)
    connector.scheduler_adapter = SimpleNamespace(num_blocks_per_chunk=lambda: 2)
    adapter = LMCacheMPAdapter(connector, LMCACHE_MP, hash_tokens=128)
    adapter.stored.learn(hashes("abcd"), 128, 256, 512)
    assert adapter.skip(FakeRequest("a", block_hashes=hashes("abcd")), 128)
    assert connector.request_trackers["a"] == UpstreamTracker(UpstreamState.PREFETCHING, 4, 1, 0)
    meta = SimpleNamespace(requests=[store_item("a", 512), SimpleNamespace(direction="RETRIEVE", request_id="a")])
    adapter.stop_stores()
    adapter.resume_stores()
    adapter.meta_built(meta, stores=False)
    assert [item.direction for item in meta.requests] == ["RETRIEVE"]


def test_lmcache_mp_cannot_skip_where_the_tracker_is_of_another_shape() -> None:
    connector = MPConnector(tracker=SimpleNamespace)
    assert not LMCacheMPAdapter(connector, LMCACHE_MP, hash_tokens=128).skip(FakeRequest(), 0)


@pytest.mark.parametrize("can_store", [True, False])
def test_lmcache_mp_store_switch_returns_to_what_it_was(can_store: bool) -> None:
    connector = MPConnector()
    connector._can_store = can_store
    adapter = LMCacheMPAdapter(connector, LMCACHE_MP, hash_tokens=128)
    adapter.stop_stores()
    assert connector._can_store is False
    adapter.resume_stores()
    assert connector._can_store is can_store


def test_lmcache_mp_workers_tell_stores_under_way_and_failed_loads() -> None:
    meta = SimpleNamespace(requests=[store_item("a", 512)])
    worker = SimpleNamespace(store_futures={"a": object(), "b": object()}, _failed_request_ids={"c"})
    connector = SimpleNamespace(worker_adapter=worker, _connector_metadata=meta)
    adapter = LMCacheMPAdapter(connector, LMCACHE_MP)
    assert adapter.pending_stores() == {"a": 512, "b": 0}
    assert adapter.failed_loads() == {"c"}
    worker.store_futures = {}
    assert adapter.pending_stores() == {}


def test_lmcache_mp_eager_lookups_are_known() -> None:
    adapter = LMCacheMPAdapter(MPConnector(_eager_prefetch=True), LMCACHE_MP)
    assert adapter.lookup_starts_early(FakeRequest())
    assert not adapter.lookup_starts_early(FakeRequest(resumable=True))
    assert not LMCacheMPAdapter(MPConnector(), LMCACHE_MP).lookup_starts_early(FakeRequest())


@dataclass
class LoadSpec:
    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool


class Engine:
    def __init__(self) -> None:
        self.load_specs: dict[str, LoadSpec] = {}
        self._lmcache_chunk_size = 256
        self._requests_priority: dict[str, int] = {}
        self._unfinished_requests: dict[str, Any] = {}
        self._max_tokens_per_load = 0
        self.force_skip_save = False


def test_lmcache_skip_leaves_a_spec_that_loads_nothing_and_knows_what_is_stored() -> None:
    assert sys.modules[Engine.__module__].LoadSpec is LoadSpec
    engine = Engine()
    adapter = LMCacheAdapter(SimpleNamespace(_lmcache_engine=engine), LMCACHE, hash_tokens=128)
    adapter.stored.learn(hashes("abcd"), 128, 256, 512)
    adapter.skip(FakeRequest("a", block_hashes=hashes("abcd"), priority=3), 128)
    assert engine.load_specs["a"] == LoadSpec(128, 512, can_load=False)
    engine.load_specs["loads"] = LoadSpec(0, 512, can_load=True)
    for request_id in ("a", "loads", "unknown"):  # gone before their first step
        adapter.forget(request_id)
    assert list(engine.load_specs) == ["loads"]
    assert engine._requests_priority["a"] == 3


def test_lmcache_refusals_of_a_preempted_request_stay_within_what_vllm_computed() -> None:
    engine = Engine()
    adapter = LMCacheAdapter(SimpleNamespace(_lmcache_engine=engine), LMCACHE, hash_tokens=128)
    adapter.stored.learn(hashes("abcd"), 128, 256, 512)
    back = FakeRequest("a", block_hashes=hashes("abcd"), status=FakeStatus("PREEMPTED"))
    adapter.skip(back, 128)
    assert engine.load_specs["a"] == LoadSpec(128, 128, can_load=False)
    engine.load_specs["a"] = LoadSpec(128, 512, can_load=False)
    adapter.declined(back, 128)
    assert engine.load_specs["a"].lmcache_cached_tokens == 128
    engine.load_specs["b"] = LoadSpec(128, 512, can_load=False)
    adapter.declined(FakeRequest("b"), 128)
    assert engine.load_specs["b"].lmcache_cached_tokens == 512  # else the hit would be written again


def test_lmcache_learns_from_lookups_and_stores() -> None:
    engine = Engine()
    adapter = LMCacheAdapter(SimpleNamespace(_lmcache_engine=engine), LMCACHE, hash_tokens=128)
    request = FakeRequest("a", block_hashes=hashes("abcdefgh"))
    engine.load_specs["a"] = LoadSpec(0, 512, can_load=False)
    assert adapter.answered(request, 0, 512) == -1
    assert adapter.stored.known(request.block_hashes, 128, 256) == 512
    engine._unfinished_requests["a"] = request
    item = SimpleNamespace(req_id="a", save_spec=SimpleNamespace(can_save=True), token_ids=range(1024))
    adapter.meta_built(SimpleNamespace(requests=[item, SimpleNamespace(save_spec=None)]), stores=True)
    assert adapter.stored.known(request.block_hashes, 128, 256) == 1024


@pytest.mark.parametrize("before", [True, False])
def test_lmcache_store_switch_returns_to_what_it_was(before: bool) -> None:
    engine = Engine()
    engine.force_skip_save = before
    adapter = LMCacheAdapter(SimpleNamespace(_lmcache_engine=engine), LMCACHE)
    adapter.stop_stores()
    assert engine.force_skip_save
    adapter.resume_stores()
    assert engine.force_skip_save is before


def test_example_stores_are_taken_out_of_the_step() -> None:
    meta = SimpleNamespace(requests=[SimpleNamespace(is_store=True), SimpleNamespace(is_store=False)])
    adapter = ExampleAdapter(None, EXAMPLE)
    adapter.meta_built(meta, stores=True)
    assert len(meta.requests) == 2
    adapter.meta_built(meta, stores=False)
    assert [item.is_store for item in meta.requests] == [False]
