"""A scheduler of the size of a page: it asks the guarded connector as vLLM's does, and loads end when told.

Requests go waiting -> (lookup) -> loading or prefilling -> decoding -> finished. A failed load sends its request back
to waiting, as vLLM's policy `recompute` does, which asks the connector again.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.hook.fakes_vllm import Clock, FakeBlocks, FakeRequest, FakeStatus, output, step


@dataclass
class FakeEngine:
    """`fails(request_id)` says whether a load that ends now has failed. `moment` is called between any two events."""

    connector: Any
    clock: Clock
    seed: int = 0
    fails: Callable[[str], bool] = lambda _: False
    moment: Callable[[], None] = lambda: None
    waiting: list[FakeRequest] = field(default_factory=list)
    loading: dict[str, FakeRequest] = field(default_factory=dict)
    running: list[FakeRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def add(self, request_id: str, tokens: int = 4000) -> FakeRequest:
        request = FakeRequest(request_id, tokens, arrival_time=self.clock.wall_seconds())
        self.connector.on_new_request(request)
        self.waiting.append(request)
        return request

    def step(self, milliseconds: float = 10.0) -> None:
        """One step: schedules what waits, ends some loads, makes a token each."""
        new = []
        for request in list(self.waiting):
            self.moment()
            tokens, asynchronous = self.connector.get_num_new_matched_tokens(request, 0)
            if tokens is None:
                continue
            self.moment()
            self.waiting.remove(request)
            self.connector.update_state_after_alloc(request, FakeBlocks(1), tokens)
            if tokens and asynchronous:
                self.loading[request.request_id] = request
                self.loads[request.request_id] = self.loads.get(request.request_id, 0) + 1
            else:
                new.append(request)
        self.moment()
        self.running += new
        self.connector.build_connector_meta(step(*new, running=len(self.running)))
        self.clock.tick(milliseconds)
        self.moment()
        ended = {name for name in self.loading if self.rng.random() < 0.5}
        failed = {name for name in ended if self.fails(name)}
        self.connector.update_connector_output(output(finished=ended or None, failed=failed))
        for name in ended:
            request = self.loading.pop(name)
            if name in failed:
                self.waiting.append(request)
            else:
                self.running.append(request)
                self.connector.build_connector_meta(step(request, running=len(self.running)))
        for request in list(self.running):
            request.num_output_tokens += 1
        self.moment()
        self.connector.get_kv_connector_stats()
        for request in list(self.running):
            if request.num_output_tokens >= 3:
                self.running.remove(request)
                self.finish(request, "FINISHED_STOPPED")

    def finish(self, request: FakeRequest, status: str) -> None:
        request.status = FakeStatus(status)
        self.moment()
        self.connector.request_finished(request, [])
        self.finished.append(request.request_id)

    def abort(self, request_id: str) -> None:
        """The client has gone; a load that is under way ends later."""
        for request in (*self.waiting, *self.running, *self.loading.values()):
            if request.request_id == request_id:
                self.waiting = [one for one in self.waiting if one is not request]
                self.running = [one for one in self.running if one is not request]
                self.loading.pop(request_id, None)
                self.finish(request, "FINISHED_ABORTED")
                return

    def drain(self, most: int = 500) -> None:
        """Steps until nothing is left."""
        for _ in range(most):
            if not (self.waiting or self.loading or self.running):
                return
            self.step()
        raise AssertionError(f"stranded: {len(self.waiting)} wait, {len(self.loading)} load, {len(self.running)} run")
