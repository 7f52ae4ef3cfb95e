"""Just enough of vLLM for the hook's tests: requests, steps, worker outputs and a connector like LMCache's."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class FakeStatus:
    def __init__(self, name: str) -> None:
        self.name = name


@dataclass
class FakeRequest:
    request_id: str = "cmpl-a-0-0123abcd"
    num_prompt_tokens: int = 4000
    arrival_time: float = 0.0
    trace_headers: dict[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    num_output_tokens: int = 0
    status: FakeStatus = field(default_factory=lambda: FakeStatus("WAITING"))
    block_hashes: list[bytes] = field(default_factory=list)
    resumable: bool = False
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class FakeBlocks:
    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


def step(*new: FakeRequest, running: int | None = None) -> SimpleNamespace:
    """A scheduler output in which `new` requests are scheduled for the first time."""
    count = len(new) if running is None else running
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id) for request in new],
        num_scheduled_tokens={str(index): 1 for index in range(count)},
    )


def output(
    finished: set[str] | None = None,
    failed: set[str] | None = None,
    blocks: set[int] | None = None,
    meta: Any = None,
) -> SimpleNamespace:
    """What the workers reported for a step."""
    return SimpleNamespace(
        finished_recving=finished,
        finished_sending=None,
        failed_recving=failed or set(),
        invalid_block_ids=blocks or set(),
        kv_connector_worker_meta=meta,
        kv_connector_stats=None,
    )


class Role:
    def __init__(self, name: str) -> None:
        self.name = name


SCHEDULER = Role("SCHEDULER")
WORKER = Role("WORKER")


class Meta:
    """Metadata of a step, with room for an extra attribute."""

    def __init__(self) -> None:
        self.requests: list[Any] = []


class FakeConnector:
    """A remote tier that matches `match` tokens and notes every call."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.calls: list[str] = []
        self.match: tuple[int | None, bool] = (2048, True)
        self.raises: BaseException | None = None
        self.seen_meta: Any = "unset"
        self._connector_metadata: Any = None
        self.worker_meta: Any = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.raises is not None:
            raise self.raises

    def on_new_request(self, request: Any) -> None:
        self._call("on_new_request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._call("get_num_new_matched_tokens")
        return self.match

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._call(f"update_state_after_alloc {num_external_tokens}")

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        self._call("build_connector_meta")
        return Meta()

    def update_connector_output(self, connector_output: Any) -> None:
        self._call("update_connector_output")
        self.seen_meta = connector_output.kv_connector_worker_meta

    def get_kv_connector_stats(self) -> None:
        self._call("get_kv_connector_stats")

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._call("request_finished")
        return True, None

    def shutdown(self) -> None:
        self._call("shutdown")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._call("start_load_kv")

    def wait_for_save(self) -> None:
        self._call("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._call("get_finished")
        return None, set(finished_req_ids)

    def build_connector_worker_meta(self) -> Any:
        self._call("build_connector_worker_meta")
        return self.worker_meta


class MooncakeStoreConnector(FakeConnector):
    """Known by name: may be skipped without further ado."""


class NixlConnector(FakeConnector):
    """Known by name: moves KV between prefill and decode engines."""


def vllm_config(**transfer: Any) -> SimpleNamespace:
    """The parts of vLLM's configuration that the hook reads."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=transfer.pop("extra", {}),
            kv_role=transfer.pop("kv_role", "kv_both"),
            kv_load_failure_policy=transfer.pop("policy", "recompute"),
        ),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, data_parallel_rank=0),
        cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(served_model_name=["tiny"], model="/m"),
    )


class Clock:
    """Monotonic and wall nanoseconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.offset = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        return self.now

    def wall(self) -> int:
        return self.now + self.offset

    def wall_seconds(self) -> float:
        return self.wall() / 1e9

    def tick(self, milliseconds: float) -> None:
        self.now += int(milliseconds * 1e6)
