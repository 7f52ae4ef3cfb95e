"""What happens when in a simulation: a heap of steps, each of which may add others."""

import heapq
import itertools
import math
from collections.abc import Callable

Step = Callable[[float], None]


class Schedule:
    """Steps run in the order of their times and see their own time, in seconds, as now."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Step]] = []
        self._numbers = itertools.count()

    def at(self, when: float, step: Step) -> None:
        """Adds a step; one that is never to happen (infinity) is dropped."""
        if when < math.inf:
            heapq.heappush(self._heap, (when, next(self._numbers), step))

    def run_until(self, now: float) -> float:
        """Runs what is due; returns the time of the next step, infinity when there is none."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            when, _, step = heapq.heappop(heap)
            step(when)
        return heap[0][0] if heap else math.inf
