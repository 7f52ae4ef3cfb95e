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

_connectors: list[tuple[Any, type]] = []
"""Connectors and the guarded class of each, once looked for."""


def register() -> None:
    """Waits for signals, in the processes whose main thread loads plugins."""
    path = os.environ.get("LAB_HOOK_SWITCH")
    if path and threading.current_thread() is threading.main_thread():
        said = Path(f"{path}.{os.getpid()}")

        def switch(number: int, _frame: object) -> None:
            out = number == signal.SIGUSR1
            if not _connectors:
                _connectors.extend((found, type(found)) for found in _everything() if INNER in vars(type(found)))
            for connector, guarded in _connectors:
                connector.__class__ = getattr(guarded, INNER) if out else guarded
            whole = Path(f"{path}-{os.getpid()}")
            whole.write_text(f"{'out' if out else 'in'} {len(_connectors)}")
            whole.replace(said)

        signal.signal(signal.SIGUSR1, switch)
        signal.signal(signal.SIGUSR2, switch)
        said.write_text("ready 0")


def _everything() -> list[Any]:
    """All objects that the collector knows; vLLM has frozen those of its start, so they are thawed for the look."""
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found
