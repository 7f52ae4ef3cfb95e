"""What one engine saw itself of one backend: reads in flight, their ages, and how long reads took against projected.

It bridges the second or two until the service's next word. Pure: the caller passes the time, in nanoseconds of a
monotonic clock. Every method takes constant time; one thread writes (the engine's), others may read.

Evidence and what becomes of it:

- a read in flight that is older than projected is `overdue`: a new one is projected to take at least as many times
  its own projection;
- x = log(actual / projected) of reads that ended: m moves halfway to x, and at once to the nearer of two that follow
  one another when both are slower, or both faster, than m. exp(m) is the `slowdown`. m fades with a time constant of
  five seconds, and moves with the projection when the service sends new coefficients, so that what it has learned does
  not count twice;
- three failed reads in a row, none good between: `broken` for ten seconds, then one may try.

A read is no evidence any more once one that began after it ended in time (its request was aborted, its worker died, its
connection waits for a retransmission), nor does it load the link then; nor is its end evidence when it comes at last.
Permits age out: after `PERMIT_NS` a read counts as in flight no longer.
"""

import math
from collections import OrderedDict
from typing import Final

from guard.costs import Costs

PERMIT_NS: Final = 60 * 10**9
"""A read counts as in flight for so long: an abort or a dead worker cannot close the gate for ever."""

FADE_SECONDS: Final = 5.0
BREAKER_FAILURES: Final = 3
BREAKER_NS: Final = 10 * 10**9
NOISE: Final = 0.15
"""Least log ratio that counts as slow when two follow one another; the coefficients' own spread counts if larger."""

NEVER: Final = -(1 << 62)

_IN_TIME: Final = math.log(2.0)
"""Log ratio up to which the end of a read shows that the link moves, and those that began earlier were overtaken."""

_OVERTAKEN: Final = 4
"""A read that is in flight for so many times what another took that began later is stuck, and that one got past it."""

_LOG_LIMIT: Final = math.log(1000.0)


class _Read:
    __slots__ = ("late", "longest", "projected", "size", "start")

    def __init__(self, start: int, projected: float, longest: float, late: float, size: int) -> None:
        self.start = start
        self.projected = projected
        self.longest = longest
        self.late = late
        self.size = size


class Pace:
    """Reads of one backend by one engine."""

    __slots__ = (
        "_at", "_costs", "_last", "_looked", "_looking", "_m", "_open", "_size", "failures", "inflight_bytes",
        "last_failure", "last_trickle", "proved",
    )  # fmt: skip

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Read] = OrderedDict()
        self._costs: Costs | None = None
        self._m = 0.0  # as it was at _at
        self._at = 0
        self._last = 0.0  # x of the last read
        self._size = 0.0
        self._looked = self._looking = -NEVER  # the last steps of the engine but one, and the last
        self.inflight_bytes = 0
        self.proved = -1  # start of the latest read that ended in time
        self.failures = 0  # in a row
        self.last_failure = 0
        self.last_trickle = NEVER

    @property
    def inflight(self) -> int:
        """Reads in flight, those that have aged out included until `age_out` is called."""
        return len(self._open)

    def flight(self, now: int) -> tuple[int, int]:
        """Reads that load the link, and their bytes: not those that are late and overtaken, which wait for nothing."""
        count, size = len(self._open), self.inflight_bytes
        for read in self._open.values():
            if read.start > self.proved:
                break
            if read.late and (now - read.start) / 1e9 > read.late:
                count -= 1
                size -= read.size
        return count, size

    def learn(self, costs: Costs | None) -> None:
        """New coefficients are in force: what was seen is now measured against them."""
        old, self._costs = self._costs, costs
        if costs is None or old is None:
            self._m = self._last = 0.0
            return
        before, after = old.read_seconds(self._size), costs.read_seconds(self._size)
        if before > 0.0 and after > 0.0:
            shift = math.log(before / after)
            self._m = min(max(self._m + shift, 0.0), _LOG_LIMIT) if self._m else 0.0
            self._last += shift

    def begin(self, key: int, now: int, projected: float, size: int, longest: float = 0.0) -> None:
        """A read begins that is projected to take `projected` seconds (0: not known), `longest` where its size is not.

        Late is what is older than that at the tail: a read that is larger than usual must not look stuck.
        """
        longest = max(projected, longest)
        tail = self._costs.fetch_tail if self._costs is not None else 1.0
        self._open[key] = _Read(now, projected, longest, longest * max(tail, 1.0 + 2.0 * NOISE), size)
        self.inflight_bytes += size

    def end(self, key: int, now: int, *, ok: bool = True, projected: float | None = None, waited: int = 0) -> None:
        """A read ended. `projected` replaces what was said at its begin, where its size is known only now.

        `waited` nanoseconds may have passed until a step of the engine saw its end: what it took lies between the time
        without them and with them. It counts as that of these which is nearest to what is known, so where it may have
        taken just that it is no evidence either way, unless it was in time for sure.
        """
        read = self._open.pop(key, None)
        if read is None:
            return
        self.inflight_bytes -= read.size
        expected = read.projected if projected is None else projected
        if not ok:
            self.failures += 1
            self.last_failure = now
            return
        self.failures = 0
        if expected <= 0.0:
            self.proved = max(self.proved, read.start)  # nobody says what is in time: an end is progress
            return
        took = now - read.start
        x = min(max(math.log(max(took, 1) / 1e9 / expected), -_LOG_LIMIT), _LOG_LIMIT)
        in_time = x <= max(self._noise(), _IN_TIME)
        m = self.logarithm(now)
        if x > 0.0 and waited:
            least = max(math.log(max(took - waited, 1) / 1e9 / expected), 0.0)
            nearest = min(max(m, least), x)
            if nearest == m and not in_time:
                return
            x = least if in_time else nearest
        self._size = read.size or self._size
        if in_time or now - self._oldest(now) > _OVERTAKEN * (now - read.start):
            self.proved = max(self.proved, read.start)
        elif read.start < self.proved and now - read.start > FADE_SECONDS * 1e9:
            return  # it was stuck and is out at last: what it tells of has been seen to be over
        low, high = min(x, self._last), max(x, self._last, 0.0)
        m = low if low > max(m, self._noise()) else high if high < m else max(0.0, m + 0.5 * (x - m))
        self._m, self._at, self._last = m, now, x

    def forget(self, key: int) -> None:
        """A read ended that says nothing, for example a lookup that found nothing."""
        read = self._open.pop(key, None)
        if read is not None:
            self.inflight_bytes -= read.size

    def step(self, now: int) -> None:
        """The engine's scheduler has gone through its requests; a connector asks in one step and hears in the next."""
        self._looked, self._looking = self._looking, now

    def age_out(self, now: int) -> None:
        """Drops reads that are too old to count as in flight."""
        opened = self._open
        while opened:
            key, read = next(iter(opened.items()))
            if now - read.start < PERMIT_NS:
                break
            del opened[key]
            self.inflight_bytes -= read.size

    def logarithm(self, now: int) -> float:
        """Faded log of actual over projected."""
        if not self._m:
            return 0.0
        return self._m * math.exp((self._at - now) / (FADE_SECONDS * 1e9))

    def slowdown(self, now: int) -> float:
        """How many times the projected time reads take, never below 1; noise counts as 1."""
        m = self.logarithm(now)
        return math.exp(m) if m > self._noise() else 1.0

    def overdue(self, now: int) -> float:
        """Age over projection of the oldest read that is late and not overtaken; 0: there is none."""
        now = min(now, self._looked)  # ends since then may not have been seen
        for read in self._open.values():
            if read.start > self.proved and read.late:
                age = (now - read.start) / 1e9
                return age / read.longest if age > read.late else 0.0
        return 0.0

    @property
    def costs(self) -> Costs | None:
        """The coefficients that reads are measured against."""
        return self._costs

    def _oldest(self, now: int) -> int:
        return next(iter(self._open.values())).start if self._open else now

    def oldest_age(self, now: int) -> float:
        """Age of the oldest read that is in flight and not overtaken, seconds; 0: there is none."""
        for read in self._open.values():
            if read.start > self.proved:
                return (now - read.start) / 1e9
        return 0.0

    def broken(self, now: int) -> bool:
        """Whether reads failed one after another a moment ago."""
        return self.failures >= BREAKER_FAILURES and now - self.last_failure < BREAKER_NS

    def trickle_due(self, now: int, gap: float | None) -> bool:
        """Whether a trickle of one read every `gap` seconds has one due; it waits for the one that is under way."""
        if gap is None:
            return False
        if (
            self.last_trickle == NEVER and gap > 1.0
        ):  # an exploring one comes a gap after the first refusal, not at once
            self.last_trickle = now
        patience = gap * 8.0 if self.oldest_age(now) > 0.0 else gap
        return now - self.last_trickle >= patience * 1e9

    def _noise(self) -> float:
        return max(NOISE, math.log(self._costs.fetch_tail)) if self._costs is not None else NOISE
