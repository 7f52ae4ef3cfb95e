"""A service in this process over a temporary ledger, with clocks that tests turn; and a real one as a subprocess."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from guard.history.ledger import Ledger
from guard.service.app import create_app
from guard.service.auth import Tokens
from guard.service.directives import Clock
from guard.service.runtime import Runtime
from guard.settings import Settings

NOW = 1_800_000_000.0


class Hands:
    """Two clocks; `advance` turns both, `step` only the wall."""

    def __init__(self) -> None:
        self.wall = NOW
        self.mono = 50.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.mono)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state")


@pytest.fixture
def make_runtime(hands: Hands) -> Callable[..., Runtime]:
    def make(settings: Settings) -> Runtime:
        return Runtime(settings, Ledger(settings.state_dir), hands.clock())

    return make


@pytest.fixture
def serving() -> Callable[..., contextlib.AbstractAsyncContextManager[httpx2.AsyncClient]]:
    """Runs the app of a runtime and gives a client for it."""

    @contextlib.asynccontextmanager
    async def run(runtime: Runtime, tokens: Tokens | None = None) -> AsyncIterator[httpx2.AsyncClient]:
        app = create_app(runtime, tokens or Tokens(None))
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                yield client

    return run


@pytest.fixture
async def runtime(settings: Settings, make_runtime: Callable[[Settings], Runtime], anyio_backend: str) -> Runtime:
    return make_runtime(settings)


@pytest.fixture
async def client(runtime: Runtime, serving: Any, anyio_backend: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(runtime) as found:
        yield found


class Served:
    """A `kvguard serve` of its own; `log` holds the lines of its stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._told.wait(60)
        assert self.url, self.log

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.strip())
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                if entry["event"] == "listening":
                    self.url = entry["url"]
                    self._told.set()
        self._told.set()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def clean_env(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")} | more


def launch(state: Path, *flags: str, **env: str) -> Served:
    """A `kvguard serve` on a free port."""
    command = [sys.executable, "-m", "guard.cli", "serve", "--port", "0", "--state-dir", str(state), *flags]
    return Served(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_env(**env)))


@contextlib.contextmanager
def polled(url: str, engine: str, model: str, backend: str) -> Iterator[None]:
    """A hook that polls the service at `url` and applies what it is told, until the end."""
    over = threading.Event()
    tag = httpx2.get(f"{url}/v1/directives/{engine}", params={"model": model, "backend": backend}).headers["etag"]

    def poll() -> None:
        told = tag
        params = {"model": model, "backend": backend, "wait": "0.5"}
        with httpx2.Client(base_url=url, timeout=60) as client:
            while not over.is_set():
                answer = client.get(f"/v1/directives/{engine}", params=params, headers={"If-None-Match": told})
                told = answer.headers["etag"]

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


@contextlib.contextmanager
def started(state: Path, **env: str) -> Iterator[str]:
    """The URL of a `kvguard serve`, which is stopped at the end."""
    served = launch(state, **env)
    try:
        yield served.url
    finally:
        served.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts `kvguard serve` on a free port; whatever still runs is stopped at the end."""
    running: list[Served] = []

    def start(*flags: str, state: Path | None = None, **env: str) -> Served:
        running.append(launch(state or tmp_path / "state", *flags, **env))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.stop(signal.SIGKILL)
