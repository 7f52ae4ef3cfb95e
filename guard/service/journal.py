"""The ledger behind a thread of its own, so that a disk write never holds up the event loop.

A switch is written at once and waited for. What kvguard does by itself (events with evidence, state of the controller)
is gathered and written together with the next tick; while the disk refuses, the newest of it waits in memory.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import structlog

from guard.errors import LedgerError
from guard.history.ledger import Ledger, LedgerFullError
from guard.service.problems import Problem
from guard.wire import Event

RETRY_SECONDS: Final = 30.0
MAX_WAITING: Final = 10_000
"""Events that wait to be written; beyond it the oldest are lost."""

_T = TypeVar("_T")
log = structlog.get_logger("guard.service.journal")


class Journal:
    """Reads and writes the ledger; used from the event loop only."""

    def __init__(self, ledger: Ledger, monotonic: Callable[[], float]) -> None:
        self.problem = ""  # of the last write; empty when it worked
        self._ledger = ledger
        self._monotonic = monotonic
        self._thread = ThreadPoolExecutor(1, "kvguard-ledger")
        self._states = ledger.states()
        self._changed: set[str] = set()
        self._events: deque[Event] = deque(maxlen=MAX_WAITING)
        self._retry = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def state(self, key: str) -> Any:
        """What was last put under `key`, in this run or one before; None: nothing."""
        text = self._states.get(key)
        return json.loads(text) if text else None

    def put_state(self, key: str, value: Any) -> None:
        """Keeps `value` (anything JSON can say; None takes it away) for the next run; written with the next `flush`."""
        text = "" if value is None else json.dumps(value, separators=(",", ":"))
        if text != self._states.get(key, ""):
            self._states[key] = text
            self._changed.add(key)

    def note(self, event: Event) -> None:
        """Adds something that kvguard did by itself to the history; written with the next `flush`."""
        self._events.append(event)

    def flush(self) -> None:
        """Begins to write what waits, unless a write is under way or has just failed."""
        waits = self._events or self._changed
        if waits and self._monotonic() >= self._retry and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._flush())

    async def do(self, call: Callable[[Ledger], _T]) -> _T:
        """Runs `call` on the ledger's thread, after what was asked for before.

        Raises:
            Problem: 507 when the disk is full, 503 when the ledger cannot be used.
        """
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, call, self._ledger)
        except LedgerError as error:
            if str(error) != self.problem:
                log.warning("ledger_failed", problem=str(error))
            self.problem = str(error)
            status = 507 if isinstance(error, LedgerFullError) else 503
            raise Problem(status, str(error), kind="ledger", headers={"Retry-After": "30"}) from None
        self.problem = ""
        return result

    async def close(self) -> None:
        """Writes what waits and closes the ledger."""
        if self._task:
            await asyncio.wait([self._task])
        if self._events or self._changed:
            await self._flush()
        await asyncio.to_thread(self._thread.shutdown)
        self._ledger.close()

    async def _flush(self) -> None:
        events, states = list(self._events), {key: self._states[key] for key in self._changed}
        self._events.clear()
        self._changed.clear()
        try:
            await self.do(lambda ledger: ledger.note(events, states))
        except Problem:
            self._retry = self._monotonic() + RETRY_SECONDS
            self._events.extendleft(reversed(events[: MAX_WAITING - len(self._events)]))
            self._changed |= states.keys()
