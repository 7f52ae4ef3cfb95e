"""Fixtures of the tests on real vLLM. They run through `make lab-test` (python -m lab test) and are skipped otherwise.

    pytestmark = pytest.mark.lab

    def test_something(mp):                        # LMCacheMPConnector, hook on, vLLM's spans to the service
        ...
    def test_other(stacks):                        # any set-up; a vLLM that runs with it already is used again
        stack = stacks.get(StackConfig(connector="lmcache", hook=False))

One stack runs at a time (two cores): asking for another set-up stops it, which costs about a minute, so keep tests with
one set-up together in a module.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import env
from lab.config import StackConfig
from lab.env import LabEnv
from lab.sink import Sink
from lab.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips these tests where nobody has built the lab's environment and entered its namespace."""
    if os.environ.get("KVGUARD_LAB") == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs real vLLM: make lab-test"))


class Stacks:
    """Hands out a running stack for a configuration, the same one as long as nobody asks for another."""

    def __init__(self, lab_env: LabEnv) -> None:
        self._env = lab_env
        self._stack: Stack | None = None

    def get(self, config: StackConfig) -> Stack:
        """A stack of this configuration at rest: no delays, no switches, nothing cached but in the store."""
        if self._stack is not None and (self._stack.config != config or not self._stack.alive):
            self.stop()
        if self._stack is None:
            self._stack = Stack(config, self._env).__enter__()
        self._stack.calm()
        return self._stack

    def stop(self) -> None:
        """Stops what runs. After a test has broken something on purpose."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.__exit__(None, None, None)


@pytest.fixture(scope="session")
def lab_env() -> LabEnv:
    return env.build()


@pytest.fixture(scope="session")
def stacks(lab_env: LabEnv) -> Iterator[Stacks]:
    running = Stacks(lab_env)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def sink() -> Iterator[Sink]:
    """A stand-in for the user's tracing backend: what the services of these stacks forward arrives here."""
    with Sink() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def forward(sink: Sink) -> dict[str, str]:
    """`service_env` of a stack whose service forwards what it receives to the sink."""
    return {"KVGUARD_SERVE_FORWARD_ENDPOINT": sink.url}


@pytest.fixture
def mp(stacks: Stacks, forward: dict[str, str]) -> Stack:
    """LMCacheMPConnector with the hook, vLLM's own spans straight to the service."""
    return stacks.get(StackConfig(otlp="service", command_proxy=True, service_env=forward))


@pytest.fixture
def inprocess(stacks: Stacks, forward: dict[str, str]) -> Stack:
    """LMCache inside vLLM (synchronous loads) with the hook."""
    return stacks.get(StackConfig(connector="lmcache", otlp="service", command_proxy=True, service_env=forward))


_FIGURES: list[str] = []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Keeps a measured figure for the end of the run, where all of them are shown."""
    return lambda text: _FIGURES.append(f"{request.node.name}: {text}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows the figures that the tests measured."""
    if _FIGURES:
        terminalreporter.section("measured")
        for line in _FIGURES:
            terminalreporter.line(line)
