"""How an engine ends: as it was asked to, or of an error. For the thread that shuts it down."""

import sys
from traceback import walk_tb
from types import TracebackType
from typing import Final

LOOP: Final = "run_engine_core"
"""vLLM's function around the engine's main loop."""


def crash() -> str:
    """Name of the error that the engine ends of, on this thread; empty where it was asked to end.

    vLLM shuts its scheduler down in the `finally` of the engine's main loop, so what ended the loop is still being
    handled: SystemExit after a signal, an Exception after a failure (RuntimeError where a worker has died). The name
    alone: a message may quote a request.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, Exception) or not _of_the_loop(error.__traceback__) or _asked(error.__traceback__):
        return ""
    return type(error).__name__


def _of_the_loop(traceback: TracebackType | None) -> bool:
    """Whether the error came up through the engine's main function: a caller may shut an engine down over its own."""
    return any(frame.f_code.co_name == LOOP for frame, _ in walk_tb(traceback))


def _asked(traceback: TracebackType | None) -> bool:
    """Whether the engine had been asked to end by then: a signal to the whole process group may reach a worker first.

    `EngineCoreProc.shutdown_state` of vLLM 0.32 says so; where there is none, the signal itself ends the loop.
    """
    for frame, _ in walk_tb(traceback):
        state = getattr(frame.f_locals.get("self"), "__dict__", {}).get("shutdown_state")
        if state is not None:
            return getattr(state, "name", "") != "RUNNING"
    return False
