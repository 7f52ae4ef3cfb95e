"""Records as the joiner gives them, and a real `kvguard serve` that a browser can open."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guard.wire import FetchRecord, RequestRecord

NOW_NS = 1_800_000_000 * 10**9


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """Makes one record; `rtt` is what its fetch saw, everything else a field."""
    made = iter(range(10**9))

    def make(*, ttft: float | None = 0.4, rtt: float | None = None, **fields: Any) -> RequestRecord:
        number = next(made)
        fetches = []
        if rtt is not None:
            fetches = [FetchRecord(span_id="f", attempt=1, start_ns=NOW_NS, seconds=0.1, outcome="ok", network_rtt=rtt)]
        base: dict[str, Any] = {
            "internal_id": f"i{number}", "request_id": f"r{number}", "trace_id": "t", "span_id": f"{number}",
            "engine_id": "e/0", "model": "m", "backend": "a/b", "class_": "1k-2k/c0-4", "arrival_ns": NOW_NS,
            "prompt_tokens": 2000, "tokens_local": 0, "tokens_matched": 1024, "tokens_loaded": 1024,
            "tokens_computed": 976, "intake": 0.01, "queue": 0.02, "lookup": 0.03, "slot": 0.0, "fetch": 0.1,
            "resume": 0.01, "prefill": 0.2, "residual": 0.0, "exposed_wait": 0.13, "decision": "remote", "reason": "",
        }  # fmt: skip
        return RequestRecord(**{**base, "ttft": ttft, "fetches": fetches, **fields})

    return make


class Service:
    """A `kvguard serve` of its own on a free port."""

    def __init__(self, state: Path, *flags: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
        command = [sys.executable, "-m", "guard.cli", "serve", "--port", "0", "--state-dir", str(state), *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.url = ""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with contextlib.suppress(ValueError, KeyError):
                self.url = json.loads(line)["url"]
                break
        assert self.url, "the service did not start"

    def stop(self) -> None:
        assert self._process.stderr is not None
        if self._process.stderr.closed:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.stderr.read()
        self._process.wait(20)
        self._process.stderr.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Starts services; they are stopped at the end."""
    running: list[Service] = []

    def one(*flags: str) -> Service:
        running.append(Service(tmp_path_factory.mktemp("state"), *flags))
        return running[-1]

    yield one
    for service in running:
        service.stop()
