"""A planned end of an engine and a crash, told apart where vLLM shuts the connector down."""

from contextlib import suppress
from enum import IntEnum

import pytest

from guard.hook.ending import crash


class State(IntEnum):
    RUNNING = 0
    REQUESTED = 1


class FakeEngineCore:
    """The main loop of `EngineCoreProc`, and what `run_engine_core` does when it ends."""

    def __init__(self, state: State | None, error: BaseException | None) -> None:
        if state is not None:
            self.shutdown_state = state
        self.error = error
        self.fatal = False
        self.told = "never shut down"

    def run_busy_loop(self) -> None:
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.told = crash()


def run_engine_core(core: FakeEngineCore) -> None:
    try:
        core.run_busy_loop()
    except Exception:
        core.fatal = True
        raise
    finally:
        core.shutdown()


@pytest.mark.parametrize(
    ("state", "error", "told"),
    [
        (State.RUNNING, RuntimeError("Executor failed."), "RuntimeError"),  # a worker died
        (State.RUNNING, AssertionError(), "AssertionError"),
        (State.REQUESTED, SystemExit(), ""),  # SIGTERM
        (State.REQUESTED, RuntimeError("cancelled"), ""),  # SIGTERM to all processes, of which a worker ended first
        (None, RuntimeError("Executor failed."), "RuntimeError"),  # a vLLM without that state
        (None, SystemExit(), ""),
        (None, KeyboardInterrupt(), ""),
        (State.RUNNING, None, ""),  # an engine in the caller's process
    ],
)
def test_what_ends_of_an_error_crashed_what_was_asked_to_end_did_not(
    state: State | None, error: BaseException | None, told: str
) -> None:
    core = FakeEngineCore(state, error)
    with suppress(BaseException):
        run_engine_core(core)
    assert core.told == told


def test_an_error_that_was_dealt_with_before_is_no_crash() -> None:
    core = FakeEngineCore(State.RUNNING, None)
    with suppress(ValueError):
        raise ValueError
    run_engine_core(core)
    assert core.told == ""


def test_an_error_of_the_caller_is_no_crash_of_the_engine_in_its_process() -> None:
    core = FakeEngineCore(None, None)
    try:
        int("the caller's own")
    except ValueError:
        core.shutdown()
    assert core.told == ""
