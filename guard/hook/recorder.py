"""The ring between the engine's threads and the drain thread: records in, spans out. Standard library only.

A record is a small finished object. The engine thread only appends it; turning it into spans (hex ids, attributes)
is the work of `spans()`, which the drain thread calls.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from guard.wire import Span

CAPACITY: Final = 8192
"""Records kept by default: at two records per request, minutes of traffic of a busy engine."""


class Record(Protocol):
    """Something that happened in the engine and is over."""

    def spans(self) -> Iterable[Span]:
        """The spans that tell of it; called once, on the drain thread."""


class Recorder:
    """A bounded ring that drops its oldest record when it is full, since a control loop wants the newest.

    `append` takes constant time and no lock; it may be called from any thread. Two threads that append at the very
    same moment to a ring with one free place may leave one drop uncounted, never a record half written.
    """

    __slots__ = ("_capacity", "_ring", "dropped")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = max(1, capacity)
        self._ring: deque[Record] = deque(maxlen=self._capacity)
        self.dropped = 0

    def append(self, record: Record) -> None:
        """Adds a record; when the ring is full the oldest one is dropped and counted."""
        ring = self._ring
        if len(ring) >= self._capacity:
            self.dropped += 1
        ring.append(record)

    def drain(self, limit: int) -> list[Record]:
        """Takes up to `limit` records, oldest first. For one drain thread."""
        taken: list[Record] = []
        ring = self._ring
        try:
            while len(taken) < limit:
                taken.append(ring.popleft())
        except IndexError:
            pass
        return taken

    def __len__(self) -> int:
        return len(self._ring)
