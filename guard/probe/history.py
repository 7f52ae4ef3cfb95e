"""What the probes saw: the last rounds of every target, and the idle RTT of a backend at a time. Pure: time is given.

Idle RTT is the least of the probes around a time: the bytes of the KV traffic itself, other traffic and a busy machine
only ever raise RTT. Memory is bounded by `KEPT` rounds per target.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from guard.probe.crossing import Detector, Shift
from guard.probe.prober import Sample, Summary, Target, summarize

KEPT: Final = 900
"""Rounds kept per target: longer than requests take to be joined and probes of a `readyz` line look back."""

IDLE_ROUNDS: Final = 3
"""Rounds up to a time whose least RTT is the idle one then, and as far ahead as one of them."""

SUMMARY_SECONDS: Final = 60.0


@dataclass(slots=True)
class Track:
    """One target: its rounds, oldest first, and the plateau it is on."""

    target: Target
    rounds: deque[tuple[float, Sample]] = field(default_factory=lambda: deque(maxlen=KEPT))
    detector: Detector = field(default_factory=Detector)
    shift: Shift | None = None
    shifted_at: float | None = None
    ok: int = 0
    failed: int = 0

    def add(self, at: float, sample: Sample) -> Shift | None:
        """Takes the round of Unix time `at`; returns the shift of the idle RTT that it completes."""
        self.rounds.append((at, sample))
        self.ok += len(sample.rtts)
        self.failed += sample.sent - len(sample.rtts)
        shift = self.detector.add(at, min(sample.rtts)) if sample.rtts else None
        if shift is not None:
            self.shift, self.shifted_at = shift, at
        return shift

    def idle(self, at: float) -> float | None:
        """The idle RTT at Unix time `at`, seconds; None where nothing was measured around it."""
        found: float | None = None
        taken = 0
        for time, sample in reversed(
            tuple(self.rounds)
        ):  # what is asked for lies near the end; a scrape's thread asks too
            if time > at + self.target.interval:
                continue
            if time < at - 2 * IDLE_ROUNDS * self.target.interval or taken > IDLE_ROUNDS:
                break
            if sample.rtts:
                least = min(sample.rtts)
                found = least if found is None else min(found, least)
                taken += 1
        return found

    def summary(self, now: float, seconds: float = SUMMARY_SECONDS) -> Summary:
        """Statistics of the last `seconds`, or of the last three rounds where they are rarer."""
        since = now - max(seconds, 3 * self.target.interval)
        return summarize([sample for time, sample in self.rounds if time >= since])

    def problem(self, now: float) -> str:
        """Why nothing is measured now, or ""."""
        if not self.rounds:
            return "not probed yet"
        at, sample = self.rounds[-1]
        patience = 3 * self.target.interval + self.target.count * self.target.timeout
        if now - at > patience:
            return f"no result for {now - at:.0f} s: the probe under way hangs, or it costs more than its share"
        return "" if sample.rtts else sample.problem or "no answer"


class History:
    """All targets, in the order in which they are believed: that of the registry, then that of the configuration."""

    def __init__(self, targets: Iterable[Target], order: Iterable[str]) -> None:
        rank = self._rank = {name: index for index, name in enumerate(order)}
        self.tracks: Mapping[tuple[str, str], Track] = {
            target.key: Track(target) for target in sorted(targets, key=lambda one: rank.get(one.prober, len(rank)))
        }
        self._by_backend: dict[str, list[Track]] = {}
        self._by_address: dict[str, list[Track]] = {}
        for track in self.tracks.values():
            self._by_address.setdefault(address(track.target.target), []).append(track)
            if track.target.backend:
                self._by_backend.setdefault(track.target.backend, []).append(track)

    def idle(self, backend: str, servers: frozenset[str], at: float) -> tuple[float, str] | None:
        """Idle RTT of a backend at Unix time `at`, seconds, and the prober that saw it; None where nobody did.

        `servers` are the `host:port` that its fetches were told to go to: a target that is one of them needs no
        `backend` in its table. Several targets of one prober (the nodes of a store) give their median.
        """
        found: dict[str, list[float]] = {}
        for track in self.of(backend, servers):
            rtt = track.idle(at)
            if rtt is not None:
                found.setdefault(track.target.prober, []).append(rtt)
        if not found:
            return None
        prober = min(found, key=lambda name: self._rank.get(name, len(self._rank)))
        return median(found[prober]), prober

    def of(self, backend: str, servers: frozenset[str]) -> list[Track]:
        """The targets that stand for a backend: those at its servers, else those whose table names it."""
        named = [track for server in servers for track in self._by_address.get(server, ())]
        return named or self._by_backend.get(backend, [])


def address(target: str) -> str:
    """`host:port` of a target's text: without scheme, user and path."""
    return target.partition("://")[2].partition("/")[0].rpartition("@")[2] if "://" in target else target
