"""Takes kvguard's hook out of a running engine and puts it back: one engine, compared with itself. Lab only.

Loaded by vLLM as a general plugin in each of its processes, and does nothing unless `LAB_HOOK_SWITCH=PATH`. Then
SIGUSR1 takes the hook out and SIGUSR2 puts it back; each process says in `PATH.<pid>` what it did last: word, count.
"""

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

INNER = "_kvguard_inner"
"""Attribute of every guarded class: the class that it was made from."""

_taken: list[tuple[Any, type]] = []
"""Connectors without their hook, and the guarded class of each."""


def register() -> None:
    """Waits for signals, in the processes whose main thread loads plugins."""
    path = os.environ.get("LAB_HOOK_SWITCH")
    if path and threading.current_thread() is threading.main_thread():
        said = Path(f"{path}.{os.getpid()}")

        def switch(number: int, _frame: object) -> None:
            out = number == signal.SIGUSR1
            said.write_text(f"{'out' if out else 'in'} {_take_out() if out else _put_back()}")

        signal.signal(signal.SIGUSR1, switch)
        signal.signal(signal.SIGUSR2, switch)
        said.write_text("ready 0")


def _take_out() -> int:
    if not _taken:
        guarded = [found for found in gc.get_objects() if INNER in vars(type(found))]
        for connector in guarded:
            _taken.append((connector, type(connector)))
            connector.__class__ = getattr(type(connector), INNER)
    return len(_taken)


def _put_back() -> int:
    for connector, guarded in _taken:
        connector.__class__ = guarded
    count = len(_taken)
    _taken.clear()
    return count
