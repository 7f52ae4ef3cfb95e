"""Invariants 6 and 8: what the hook may cost the engine's threads, and its imports."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import guard
from guard import gate, semconv
from guard.hook import recorder, requests, scheduler, spans, table
from guard.hook.config import HookConfig
from guard.hook.exporter import SLICE_SECONDS, SLICE_SPANS, Exporter
from guard.hook.recorder import Recorder
from guard.hook.transport import Reply
from guard.wire import Reads, Span
from tests.hook.fake_runtime import OFF, FakeRuntime, new
from tests.hook.fake_transport import FakeTransport
from tests.hook.fakes_vllm import (
    FakeBlocks,
    FakeRequest,
    output,
    step,
)

FORBIDDEN = {
    "acquire", "open", "connect", "send", "sendall", "recv", "getaddrinfo", "write", "flush", "sleep", "stat", "lstat",
    "select", "poll", "wait", "dumps", "compress",
}  # fmt: skip


def test_invariant_6_no_io_and_no_lock_on_engine_threads(process: FakeRuntime) -> None:
    """Every C function that our part of a request's life calls on the scheduler's thread is looked at."""
    connector = new()
    process.directive = replace(OFF, mode=semconv.MODE_AUTO, reads=Reads(max_inflight=8, max_inflight_bytes=1 << 30))
    called: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            called.add(argument.__name__)

    request = FakeRequest(arrival_time=process.clock.wall_seconds())
    sys.setprofile(watch)
    try:
        connector.on_new_request(request)
        connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
        connector.build_connector_meta(step())
        connector.update_connector_output(output(finished={request.request_id}))
        connector.build_connector_meta(step(request))
        request.num_output_tokens = 1
        connector.get_kv_connector_stats()
        connector.request_finished(request, [])
    finally:
        sys.setprofile(None)
    assert "append" in called  # the ring was reached
    assert not called & FORBIDDEN
    assert len(process.recorder) == 2
    assert process.failsafe.errors == 0
    for part in (gate, recorder, requests, scheduler, spans, table):  # `with lock` would not show above
        assert not {"threading", "socket", "os", "io", "logging", "Path"} & set(vars(part))


def test_invariant_6_the_ring_drops_its_oldest_and_counts() -> None:
    ring = Recorder(4)
    records: list[Any] = [SimpleNamespace(number=number) for number in range(10)]
    for record in records:
        ring.append(record)
    assert ring.drain(100) == records[6:]
    assert ring.dropped == 6


def test_invariant_6_the_drain_thread_lets_go_of_the_gil_within_a_millisecond() -> None:
    class Ticking:
        """A machine on which a span takes 0.1 ms."""

        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock, held, began = Ticking(), [], [0.0]

    def pause(seconds: float) -> None:
        held.append(clock.now - began[0])
        began[0] = clock.now

    class Slow:
        def spans(self) -> list[Span]:
            clock.now += 1e-4
            return [Span("kvguard.kv.read", "1" * 32, "2" * 16, "", 1, 2, {})]

    ring = Recorder()
    for _ in range(200):
        ring.append(Slow())
    config = HookConfig(endpoints=("http://unused",))
    exporter = Exporter(config, ring, {}, transport=FakeTransport(Reply(200, b"{}")), clock=clock, pause=pause)
    exporter.step()
    assert len(held) >= 200 // SLICE_SPANS
    assert max(held) <= SLICE_SECONDS + 1e-4 + 1e-9 <= 1e-3


def test_invariant_8_import_light(tmp_path: Path) -> None:
    """Every module of the hook imports with nothing but the standard library, and starts no thread."""
    root = Path(guard.__file__).parent
    names = [
        "guard.hook." + ".".join(path.relative_to(root / "hook").with_suffix("").parts)
        for path in sorted((root / "hook").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = (
        f"import sys, importlib, threading; sys.path.insert(0, {str(root.parent)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert threading.active_count() == 1\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'guard', '__main__', '__mp_main__'}))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
    assert len(names) > 15
