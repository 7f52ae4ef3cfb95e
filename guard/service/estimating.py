"""Keeps the samples of every backend and class, fits them again every few seconds on a thread, and tells crossings.

The event loop only notes which records are new: a request that is amended meanwhile is made into a sample once, and
many samples at a time cost a fraction of what each of them costs alone. The estimator
is loaded for the first fit, on a thread too: numpy takes long, and the service can serve without.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import structlog

from guard import semconv
from guard.estimate.crossing import Crossing
from guard.estimate.shapes import Cell, Figure
from guard.semconv import Metric
from guard.service.directives import Clock
from guard.wire import Event, RequestRecord

if TYPE_CHECKING:
    from guard.estimate.samples import Ring

REFIT_SECONDS: Final = 3.0
_PAUSE: Final = 9.0  # times what the last fit took: a tenth of a core at the most
MAX_CELLS: Final = 256
"""Most rings of samples held, 0.8 MB each when full; the one that was silent longest makes room."""

MAX_NEW: Final = 65_536
"""Most records that wait for the next fit; beyond it the oldest make room, which is counted."""

_KINDS: Final = {semconv.EVENT_DEPARTURE: "departure", semconv.EVENT_BREAK_EVEN: "break_even"}

log = structlog.get_logger("guard.service.estimating")

_Key = tuple[str, str, str]


class Estimating:
    """Samples in, cells out. Simulated requests count only for a model and backend that has no real ones."""

    def __init__(self, publish: Callable[[Event], object], clock: Clock) -> None:
        self._publish = publish
        self._clock = clock
        self._rings: dict[bool, dict[_Key, Ring]] = {False: {}, True: {}}
        self._crossings: dict[tuple[str, str, str, str], Crossing] = {}
        self._cells: tuple[Cell, ...] = ()
        self._new: deque[RequestRecord] = deque(maxlen=MAX_NEW)
        self.simulated: frozenset[tuple[str, str]] = frozenset()
        self.fitted: float | None = None  # Unix seconds of the last fit
        self.seconds = 0.0  # that it took
        self.lost = 0  # records that made room before they were made into samples

    def add(self, record: RequestRecord) -> None:
        """Takes a joined record, or an amended one in the place of the first, for the next fit."""
        if record.backend:
            self.lost += len(self._new) == MAX_NEW  # one too many at the most, if a fit takes them at this moment
            self._new.append(record)

    def cells(self) -> tuple[Cell, ...]:
        """What the last fit found."""
        return self._cells

    def refit(self) -> tuple[Cell, ...]:
        """Fits everything; may run on a thread beside `add`, but not beside itself."""
        from guard.estimate.cells import fit_samples

        self._sample()
        real = dict(self._rings[False])
        pairs = {key[:2] for key in real}
        invented = {key: ring for key, ring in self._rings[True].items() if key[:2] not in pairs}
        self.simulated = frozenset(key[:2] for key in invented)
        rings = real | invented
        return tuple(fit_samples((*key, rings[key].samples()) for key in sorted(rings)))

    def settle(self, cells: Sequence[Cell]) -> None:
        """Makes these the cells and tells which points RTT has crossed; runs in the event loop."""
        self._cells = tuple(cells)
        self.fitted = self._clock.wall()
        there = {(cell.model, cell.backend, cell.class_) for cell in cells}
        self._crossings = {key: held for key, held in self._crossings.items() if key[:3] in there}
        for cell in cells:
            if cell.pooled:
                continue  # the pool tells for it
            for kind, name in _KINDS.items():
                figure: Figure = getattr(cell, name)
                crossing = self._crossings.setdefault((cell.model, cell.backend, cell.class_, kind), Crossing())
                side = crossing.look(cell.rtt_now, figure)
                if side is not None:
                    self._publish(_event(kind, cell, figure, side, self.fitted))

    async def run(self) -> None:
        """Fits until cancelled, when there is something new and not for more than a tenth of the time."""
        while True:
            await asyncio.sleep(max(REFIT_SECONDS, _PAUSE * self.seconds))
            if not self._new:
                continue
            start = self._clock.monotonic()
            try:
                await asyncio.to_thread(_load)
                start = self._clock.monotonic()
                self.settle(await asyncio.to_thread(self.refit))
            except Exception:  # the loop's outermost frame
                log.exception("refit_failed")
            self.seconds = self._clock.monotonic() - start

    def _sample(self) -> None:
        """Makes samples of the records that are new."""
        from guard.estimate.samples import Ring, row_of

        latest = {record.span_id: record for record in self._drained()}
        rows: dict[tuple[bool, _Key], list[tuple[float, ...]]] = {}
        for record in latest.values():
            row = row_of(record)
            if row is not None:
                key = (record.model, record.backend, record.class_)
                rows.setdefault((record.simulated, key), []).append(row)
        for (simulated, key), new in rows.items():
            rings = self._rings[simulated]
            ring = rings.pop(key, None) or Ring()
            if len(rings) >= MAX_CELLS:
                del rings[next(iter(rings))]
            rings[key] = ring  # at the end: heard of last
            ring.extend(new)

    def _drained(self) -> Iterator[RequestRecord]:
        """The records that are new when this is called; appending and popping are safe between threads."""
        for _ in range(len(self._new)):
            yield self._new.popleft()

    def gauges(self) -> Iterator[tuple[Metric, Sequence[str], float]]:
        """Inflection points and verdicts; classes that stand on the pool have no series of their own."""
        for cell in self._cells:
            if cell.pooled:
                continue
            labels = (cell.model, cell.backend, cell.class_)
            for kind, figure in (
                ("departure", cell.departure), ("break-even", cell.break_even), ("knee", cell.knee),
            ):  # fmt: skip
                for bound in ("value", "low", "high"):
                    value = getattr(figure, bound)
                    if value is not None:
                        yield semconv.INFLECTION_RTT, (*labels, kind, bound, figure.source), value
            for kind, value in (("now", cell.rtt_now), ("floor", cell.rtt_floor)):
                if value is not None:
                    yield semconv.INFLECTION_RTT, (*labels, kind, "value", "measured"), value
            verdict = cell.verdict
            for dimension, answer in (("state", verdict.state), ("cause", verdict.cause), ("shape", verdict.shape)):
                yield semconv.VERDICT, (*labels, dimension, answer), 1.0


def _load() -> None:
    """Once, and apart from the fit: the pause after a fit goes by its time."""
    import guard.estimate.cells  # noqa: F401


def _event(kind: str, cell: Cell, figure: Figure, side: str, at: float) -> Event:
    value, now = (figure.value or 0.0) * 1e3, (cell.rtt_now or 0.0) * 1e3
    message = {
        (semconv.EVENT_DEPARTURE, "above"): "TTFT departs from its baseline",
        (semconv.EVENT_DEPARTURE, "below"): "TTFT is back at its baseline",
        (semconv.EVENT_BREAK_EVEN, "above"): "remote reads cost more than recomputing",
        (semconv.EVENT_BREAK_EVEN, "below"): "remote reads pay again",
    }[kind, side]
    evidence: dict[str, Any] = {
        "model": cell.model, "class": cell.class_, "side": side, "rtt_seconds": cell.rtt_now, "point": asdict(figure),
    }  # fmt: skip
    return Event(
        at=at, kind=kind, scope=f"backend:{cell.backend}", evidence=evidence,
        message=f"{message}: RTT {now:.3g} ms is {side} {value:.3g} ms ({cell.model}, class {cell.class_})",
    )  # fmt: skip
