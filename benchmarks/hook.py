"""Cost of the hook on the engine's thread: the guarded connector against the same connector without the guard.

The inner connector is a bare class whose methods answer at once, so the difference between the two is the guard and
nothing else: gate, request state, ring. Each figure is the median over rounds of the mean of one round; guarded and
bare rounds alternate. No vLLM is needed. What a real engine loses is measured by `make lab-bench`.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from guard import gate
from guard.connectors import LMCACHE_MP, UNKNOWN
from guard.costs import Traffic
from guard.hook.adapters.base import Adapter
from guard.hook.connector import guarded
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.scheduler import SchedulerSide
from guard.hook.table import RequestTable
from guard.wire import Directive

ROUNDS = 15
CALLS = 4000
GATE_GOAL = 2.0
RECORD_GOAL = 1.0
DIRECTIVE = Directive(
    id="bench", engine_id="bench:8000/0", backend="bench", mode="auto",
    fetch={"seconds": 0.01, "per_byte": 1e-9, "lookup_seconds": 0.001, "spread": 0.2, "bytes_per_token": 2048.0},
    prefill={"a": 0.01, "b": 1e-4, "d": 1e-9, "spread": 0.1},
    classes={"all": {"hit": 0.8, "tokens": 1000}, "1k-2k/c5-16": {"hit": 0.9, "tokens": 1000}},
    sla={"ttft_seconds": 2.0, "percentile": 0.95},
)  # fmt: skip
TRAFFIC = Traffic(3, 3 << 21, 8, 2, 6000, 0.01)


class Bare:
    """The methods that vLLM calls, answering at once."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 1024, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace()

    def update_connector_output(self, connector_output: Any) -> None:
        pass

    def get_kv_connector_stats(self) -> Any:
        return None

    def on_new_request(self, request: Any) -> None:
        pass

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return False, None


def main() -> int:
    """Prints the table; 1 when the gate or the record misses its goal."""
    skip_us, load_us = _median(_skip_gate), _median(_load_gate)
    record_us = _record()
    calls = {
        "lookup, first call of a request": _lookups,
        "lookup, polled again": _polls,
        "one request, arrival to finish": _lifecycles,
    }
    print(f"hook: microseconds per call on the engine's thread, median of {ROUNDS} rounds of {CALLS} calls")
    _row("gate: skip or look up, both roads compared", skip_us, GATE_GOAL)
    _row("gate: load or decline, both roads compared", load_us, GATE_GOAL)
    _row("record: append to the ring", record_us, RECORD_GOAL)
    for name, measure in calls.items():
        _row(f"guard, {name}", _difference(measure))
    for pending in (0, 256):
        _row(f"guard, one engine step, {pending} requests before their first token", _step(pending))
    return int(max(skip_us, load_us) > GATE_GOAL or record_us > RECORD_GOAL)


def _row(name: str, value: float, goal: float | None = None) -> None:
    verdict = "" if goal is None else f"  goal <= {goal:g}: {'met' if value <= goal else 'MISSED'}"
    print(f"  {name:<62}{value:>9.3f}{verdict}")


def _connector(*, guard: bool) -> Any:
    if not guard:
        return Bare(None, None)
    connector = guarded(Bare)(None, None)
    backend = Backend(label="bench", capability=UNKNOWN, block_tokens=16, rank_bytes=2048)
    scope = Scope(engine_id=DIRECTIVE.engine_id, model="m", request_ids=True, strip_suffix=True, salt=b"")
    table = RequestTable(Recorder(), scope)
    connector._kvguard_scheduler = SchedulerSide(
        table, backend, Adapter(connector, UNKNOWN), lambda _: DIRECTIVE, key=1
    )
    return connector


def _requests(count: int) -> list[Any]:
    now = time.time()
    return [
        SimpleNamespace(
            request_id=f"cmpl-{number}-0-0123abcd", num_prompt_tokens=2000, num_output_tokens=0, arrival_time=now,
            trace_headers=None, kv_transfer_params=None, status=SimpleNamespace(name="FINISHED_STOPPED"),
        )
        for number in range(count)
    ]  # fmt: skip


def _timed(work: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / calls * 1e6


def _median(work: Callable[[], None]) -> float:
    return statistics.median(_timed(work, CALLS) for _ in range(ROUNDS))


def _skip_gate() -> None:
    for _ in range(CALLS):
        gate.admit_lookup(
            DIRECTIVE, LMCACHE_MP, prompt_tokens=2000, local_tokens=0, token_bytes=2048, traffic=TRAFFIC, draw=0.5
        )


def _load_gate() -> None:
    for _ in range(CALLS):
        gate.admit_load(
            DIRECTIVE, LMCACHE_MP, matched_tokens=1024, matched_bytes=1 << 21, prompt_tokens=2000, traffic=TRAFFIC,
            draw=0.5,
        )  # fmt: skip


def _record() -> float:
    recorder = Recorder()
    record: Any = SimpleNamespace()
    append = recorder.append

    def work() -> None:
        for _ in range(CALLS):
            append(record)

    return _median(work)


def _difference(measure: Callable[[Any], float]) -> float:
    """Guarded minus bare, the rounds of both in turn."""
    both = [(measure(_connector(guard=True)), measure(_connector(guard=False))) for _ in range(ROUNDS)]
    return statistics.median(ours - bare for ours, bare in both)


def _lookups(connector: Any) -> float:
    requests = _requests(CALLS)

    def work() -> None:
        for request in requests:
            connector.get_num_new_matched_tokens(request, 0)

    return _timed(work, CALLS)


def _polls(connector: Any) -> float:
    request = _requests(1)[0]
    connector.get_num_new_matched_tokens(request, 0)

    def work() -> None:
        for _ in range(CALLS):
            connector.get_num_new_matched_tokens(request, 0)

    return _timed(work, CALLS)


def _lifecycles(connector: Any) -> float:
    requests = _requests(CALLS)
    outputs = [_output([request], 1) for request in requests]
    ended = [_ended({request.request_id}) for request in requests]

    def work() -> None:
        for request, output, done in zip(requests, outputs, ended, strict=True):
            connector.on_new_request(request)
            connector.get_num_new_matched_tokens(request, 0)
            connector.update_state_after_alloc(request, None, 1024)
            connector.update_connector_output(done)
            connector.build_connector_meta(output)
            request.num_output_tokens = 1
            connector.get_kv_connector_stats()
            connector.request_finished(request, ())

    return _timed(work, CALLS)


def _step(pending: int) -> float:
    def measure(connector: Any) -> float:
        requests = _requests(pending)
        for request in requests:
            connector.on_new_request(request)
            connector.get_num_new_matched_tokens(request, 0)
        connector.build_connector_meta(_output(requests, pending))
        output, ended = _output([], pending), _ended(None)

        def work() -> None:
            for _ in range(CALLS):
                connector.build_connector_meta(output)
                connector.update_connector_output(ended)
                connector.get_kv_connector_stats()

        return _timed(work, CALLS)

    return _difference(measure)


def _output(new: list[Any], running: int) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id) for request in new],
        num_scheduled_tokens=dict.fromkeys(range(running), 1),
    )


def _ended(request_ids: set[str] | None) -> Any:
    return SimpleNamespace(
        kv_connector_worker_meta=None, finished_recving=request_ids, failed_recving=None, invalid_block_ids=None
    )
