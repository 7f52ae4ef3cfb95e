"""What happened lately: a bounded log in memory that others can wait on. All of it runs in the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from guard.wire import Event

KEPT: Final = 2000


class Events:
    """Events in the order in which they were published, numbered from 1. `told` is called with each."""

    def __init__(self, told: Callable[[Event], None] = lambda _: None, *, kept: int = KEPT) -> None:
        self.last = 0
        self.closing = False
        self._told = told
        self._held: deque[tuple[int, Event]] = deque(maxlen=kept)
        self._changed = asyncio.Event()

    def publish(self, event: Event) -> int:
        """Adds an event and wakes those who wait; returns its number."""
        self.last += 1
        self._held.append((self.last, event))
        self._wake()
        self._told(event)
        return self.last

    def since(self, number: int) -> list[tuple[int, Event]]:
        """The events after `number` that are still held, oldest first."""
        return [item for item in self._held if item[0] > number]

    async def wait(self, number: int, seconds: float) -> list[tuple[int, Event]]:
        """As `since`, but waits up to `seconds` for one."""
        found = self.since(number)
        if not found and not self.closing:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return []
            found = self.since(number)
        return found

    def close(self) -> None:
        """Ends every wait, now and from now on: the service stops."""
        self.closing = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()
