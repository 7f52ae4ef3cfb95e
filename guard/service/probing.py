"""Probes in the service: runs them, keeps what they saw, stamps requests with it, and tells of shifts.

Probers run on threads of their own; what they saw is taken in the event loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import structlog

from guard import semconv
from guard.metrics import Telemetry
from guard.probe.config import targets
from guard.probe.history import History, Track
from guard.probe.prober import Sample, Target
from guard.semconv import Metric
from guard.settings import Settings
from guard.wire import Event, RequestRecord

log = structlog.get_logger("guard.service.probing")


class Probing:
    """The probes of one service; without targets it does nothing."""

    def __init__(
        self,
        settings: Settings,
        wall: Callable[[], float],
        telemetry: Telemetry,
        publish: Callable[[Event], object],
    ) -> None:
        self._share = settings.probe_cpu_share
        self._wall = wall
        self._telemetry = telemetry
        self._publish = publish
        self._problems: dict[tuple[str, str], str] = {}
        self.targets = targets(settings.probes, settings.probe_packets_per_second)
        if self.targets:
            from guard.probe.registry import PROBERS

            self.history = History(self.targets, PROBERS)
        else:
            self.history = History((), ())

    async def run(self) -> None:
        """Probes until cancelled."""
        if not self.targets:
            return
        from guard.probe.registry import make
        from guard.probe.schedule import Schedule

        loop = asyncio.get_running_loop()

        def told(target: Target, at: float, sample: Sample) -> None:
            loop.call_soon_threadsafe(self.take, target, at, sample)

        schedule = Schedule([(target, make(target)) for target in self.targets], told, cpu_share=self._share)
        schedule.start()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(schedule.stop)

    def take(self, target: Target, at: float, sample: Sample) -> None:
        """One round: counts it, keeps it, and tells where the idle RTT has shifted."""
        track = self.history.tracks[target.key]
        lost = sample.sent - len(sample.rtts)
        for outcome, number in (("ok", len(sample.rtts)), ("failed", lost)):
            self._telemetry.count(semconv.PROBES_TOTAL, *target.key, outcome, by=number)
        for rtt in sample.rtts:
            self._telemetry.observe_value(semconv.RTT_SECONDS, *target.key, value=rtt)
        shift = track.add(at, sample)
        if shift is not None:
            self._publish(_event(track, at))
        problem = "" if sample.rtts else sample.problem
        if problem != self._problems.get(target.key, ""):  # once per change: a target that is down fails every second
            self._problems[target.key] = problem
            words = {"prober": target.prober, "target": target.target}
            if problem:
                log.warning("probe_failed", problem=problem, **words)
            else:
                log.info("probe_recovered", **words)

    def stamp(self, record: RequestRecord) -> None:
        """Gives a request the idle RTT of its store when it arrived: its fetch's word, else the probes'."""
        if record.rtt_source == "fetch":
            return
        told = [fetch.network_rtt for fetch in record.fetches if fetch.network_rtt is not None]
        if told:
            record.rtt, record.rtt_source = min(told), "fetch"
        elif self.targets and record.rtt is None:
            servers = frozenset(fetch.server for fetch in record.fetches if fetch.server)
            seen = self.history.idle(record.backend, servers, record.arrival_ns / 1e9)
            if seen is not None:
                record.rtt, record.rtt_source = seen

    def link(self, backend: str) -> tuple[float | None, bool | None]:
        """The idle RTT of a backend now, seconds, and whether its probes are answered; None: nobody measures."""
        now = self._wall()
        tracks = [track for track in self.history.of(backend, frozenset()) if track.rounds and track.rounds[-1][1].sent]
        if not tracks:
            return None, None
        seen = self.history.idle(backend, frozenset(), now)
        return (seen[0] if seen else None), any(not track.problem(now) for track in tracks)

    def gauges(self) -> Iterator[tuple[Metric, Sequence[str], float]]:
        """The idle RTT of every target that answers."""
        now = self._wall()
        for track in list(self.history.tracks.values()):
            idle = track.idle(now)
            if idle is not None:
                yield semconv.RTT_IDLE, track.target.key, idle

    @property
    def problem(self) -> str:
        """Which targets are not measured now, and why; empty where all are."""
        now = self._wall()
        failing = [(track.target, problem) for track in self._tracks() if (problem := track.problem(now))]
        if not failing:
            return ""
        target, problem = failing[0]
        return f"{len(failing)} of {len(self.targets)} targets; {target.prober} {target.target}: {problem}"

    def rows(self) -> list[dict[str, Any]]:
        """The targets as `GET /v1/probes` shows them. Times in seconds."""
        now = self._wall()
        return [_row(track, now) for track in self._tracks()]

    def _tracks(self) -> Iterable[Track]:
        return self.history.tracks.values()


def _event(track: Track, at: float) -> Event:
    shift, target = track.shift, track.target
    if shift is None:
        raise ValueError("no shift")
    times = shift.after / shift.before if shift.before > 0 else float("inf")
    return Event(
        at=at,
        kind=semconv.EVENT_RTT,
        scope=f"backend:{target.backend}" if target.backend else "fleet",
        message=f"idle RTT to {target.target} went from {_text(shift.before)} to {_text(shift.after)} ({times:.2g}x)",
        evidence={
            "target": target.target, "prober": target.prober, "backend": target.backend,
            "before_seconds": shift.before, "after_seconds": shift.after, "since": shift.since,
            "rounds": shift.rounds, "source": "measured",
        },
    )  # fmt: skip


def _row(track: Track, now: float) -> dict[str, Any]:
    target, summary, shift = track.target, track.summary(now), track.shift
    last = track.rounds[-1] if track.rounds else None
    return {
        "target": target.target,
        "prober": target.prober,
        "backend": target.backend or None,
        "source": "measured",
        "interval_seconds": target.interval,
        "count": target.count,
        "at": last[0] if last else None,
        "problem": track.problem(now),
        "idle_seconds": track.idle(now),
        "rtt_seconds": {
            "n": summary.n, "p50": summary.p50, "p50_low": summary.p50_low, "p50_high": summary.p50_high,
            "p99": summary.p99, "min": summary.minimum, "jitter": summary.jitter,
        },
        "sent": summary.sent,
        "loss_ratio": summary.loss,
        "facts": dict(last[1].facts) if last else {},
        "crossing": {
            "level_seconds": track.detector.level,
            "last": None if shift is None else {
                "at": track.shifted_at, "since": shift.since, "before_seconds": shift.before,
                "after_seconds": shift.after,
            },
        },
    }  # fmt: skip


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
