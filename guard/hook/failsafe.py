"""Counts the hook's internal errors and, past a limit, takes the hook out of vLLM's way for good.

Logging. vLLM configures the logger `vllm` (handler, level, format, `propagate: False`) and leaves the root logger
alone, so a logger named after our own package would reach no handler. The hook's logger is therefore a child of
vLLM's, `vllm.kvguard`: same stream, format and level as vLLM's own lines in every process, the user's
`VLLM_LOGGING_CONFIG_PATH` included. Outside vLLM (simulator, tests) it propagates to the root logger as usual.
"""

import logging
import threading
from typing import Final

LOGGER_NAME: Final = "vllm.kvguard"
ERROR_LIMIT: Final = 20

logger = logging.getLogger(LOGGER_NAME)


class Failsafe:
    """Error counter of one process; `tripped` means that the hook must pass every call straight to vLLM's connector.

    `record` is meant for `except` blocks on any thread. It never raises. Its only output are log lines, and these are
    bounded: one with a traceback for the first error of each kind (place and exception type), one at tripping.
    """

    def __init__(self, limit: int = ERROR_LIMIT, log: logging.Logger = logger) -> None:
        self.errors = 0
        self.tripped = False
        self._serious = 0
        self._limit = limit
        self._log = log
        self._seen: set[tuple[str, type[BaseException]]] = set()
        self._lock = threading.Lock()  # taken on the error path only

    def record(self, where: str, error: BaseException, *, own_thread: bool = False) -> None:
        """Counts one internal error that happened in `where` and was kept from vLLM.

        On a thread of the hook's `own_thread` an error cannot hurt vLLM: it counts, but does not take the hook out of
        the way. A span that cannot be encoded must not switch off the operator's `off`.
        """
        try:
            kind = (where, type(error))
            with self._lock:
                self.errors += 1
                self._serious += not own_thread
                first = kind not in self._seen
                self._seen.add(kind)
                trips = not self.tripped and self._serious >= self._limit
                if trips:
                    self.tripped = True
            if first:
                self._log.error("kvguard: internal error in %s; vLLM goes on without it", where, exc_info=error)
            if trips:
                self._log.error(
                    "kvguard: %d internal errors; the hook is now out of the way until this process restarts",
                    self._limit,
                )
        except Exception:  # noqa: BLE001, S110  a broken log handler must not reach the engine either
            pass
