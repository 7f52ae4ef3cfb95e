"""The hook's own threads: the exporter's and the poller's."""

import threading
from collections.abc import Callable


class Worker:
    """A named daemon thread that lives in one process only: a forked child has none until it starts its own."""

    def __init__(self, name: str, target: Callable[[threading.Event], None]) -> None:
        self._name = name
        self._target = target
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pid = 0

    def start(self, pid: int) -> bool:
        """Starts the thread; False when this process (its `pid`) has it already."""
        if self._thread is not None and self._pid == pid and self._thread.is_alive():
            return False
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._target, args=(self._stop,), name=self._name, daemon=True)
        self._thread.start()
        return True

    @property
    def stopping(self) -> bool:
        """Whether the thread was asked to end."""
        return self._stop.is_set()

    def signal(self) -> None:
        """Asks the thread to end."""
        self._stop.set()

    def join(self, pid: int, timeout: float) -> None:
        """Waits up to `timeout` seconds for the thread's end, if it is this process's own."""
        thread = self._thread
        if thread is not None and self._pid == pid and thread is not threading.current_thread():
            thread.join(timeout)
