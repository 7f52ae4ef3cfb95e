"""Reads of one engine against the store: a few lanes, each with one operation at a time, in pieces over the link."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from guard.simulate.clock import Schedule
from guard.simulate.link import Link

PIECES: Final = 8
"""An operation moves in so many pieces at most: RTT is looked at again, and others take their turn, between them."""

Done = Callable[[float, bool], None]


@dataclass(slots=True, eq=False)
class Operation:
    """A lookup or a fetch: fixed time, serial round trips, bytes. `done` is told its end, and whether it worked."""

    fixed: float
    trips: float
    size: int
    pieces: int
    done: Done
    deadline: float = math.inf
    left: int = 0
    broken: bool = False  # fails at its end: a fault of the store


class Lanes:
    """Operations of one engine, `readers` at a time, the others wait; an operation gives up after `timeout` seconds."""

    def __init__(self, engine: int, link: Link, schedule: Schedule, *, readers: int, timeout: float) -> None:
        self._engine = engine
        self._link = link
        self._schedule = schedule
        self._lanes = self._free = readers
        self._timeout = timeout
        self._waiting: deque[Operation] = deque()

    def start(self, now: float, operation: Operation) -> None:
        """Begins an operation, or queues it until a lane is free."""
        operation.left = max(1, min(PIECES, operation.pieces))
        operation.pieces = operation.left
        self._waiting.append(operation)
        self._next(now)

    def queued_seconds(self, rtt: float) -> float:
        """Seconds until a lane is free for one more operation, round trips only."""
        return sum(each.fixed + each.trips * rtt for each in self._waiting) / self._lanes

    def _next(self, now: float) -> None:
        while self._free and self._waiting:
            operation = self._waiting.popleft()
            self._free -= 1
            operation.deadline = now + self._timeout
            self._schedule.at(now + operation.fixed, lambda at, each=operation: self._piece(at, each))  # type: ignore[misc]

    def _piece(self, now: float, operation: Operation) -> None:
        if not operation.left:
            self._end(now, operation, ok=not operation.broken)
            return
        if self._link.hangs(now, self._engine):
            self._schedule.at(operation.deadline, lambda at: self._end(at, operation, ok=False))
            return
        ready = self._link.ready(now, self._engine)
        if ready > now:
            self._or_give_up(ready, operation)
            return
        operation.left -= 1
        share = operation.size // operation.pieces
        self._or_give_up(self._link.piece(now, self._engine, operation.trips / operation.pieces, share), operation)

    def _or_give_up(self, then: float, operation: Operation) -> None:
        if then > operation.deadline:
            self._schedule.at(operation.deadline, lambda at: self._end(at, operation, ok=False))
        else:
            self._schedule.at(then, lambda at: self._piece(at, operation))

    def _end(self, now: float, operation: Operation, *, ok: bool) -> None:
        self._free += 1
        operation.done(now, ok)
        self._next(now)
