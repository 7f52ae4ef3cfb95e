"""The one place where the stages meet: receive -> join -> estimate -> decide -> publish. It runs in the event loop.

The fit itself runs on a thread (`guard.service.estimating`).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import structlog

from guard import semconv
from guard.correlate.join import Joiner
from guard.correlate.window import Window
from guard.estimate.shapes import Cell
from guard.history.ledger import Ledger
from guard.ingest import otlp
from guard.ingest.body import Limits
from guard.metrics import Telemetry
from guard.semconv import Metric
from guard.service.archiving import Archiving
from guard.service.controlled import gauges
from guard.service.controlling import CONTROLLER, Controlling, Link
from guard.service.directives import Clock, Registry
from guard.service.estimating import Estimating
from guard.service.events import Events
from guard.service.forward import Export, Forwarder
from guard.service.journal import Journal
from guard.service.objectives import Promises
from guard.service.offload import Overrides
from guard.service.probing import Probing
from guard.service.switches import Switches
from guard.settings import Settings
from guard.wire import AttributeValue, Event

TICK_SECONDS: Final = 0.25
_SWEEP_TICKS: Final = 240  # look once a minute for what has aged out

log = structlog.get_logger("guard.service.runtime")


class Runtime:
    """The service without HTTP."""

    def __init__(self, settings: Settings, ledger: Ledger, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        overrides = Overrides(ledger.overrides(), settings.default_mode)
        self.registry = Registry(
            overrides, clock, max_engines=settings.max_engines, retention_seconds=settings.engine_retention_seconds
        )
        self.journal = Journal(ledger, clock.monotonic)
        self.events = Events(self._told)
        self.switches = Switches(self.journal, overrides, clock, self.registry.publish, self.events.publish)
        self.joiner = Joiner(lateness_seconds=settings.join_hold_seconds)
        self.window = Window(settings.window_requests, settings.window_seconds)
        self.telemetry = Telemetry(clock.monotonic, self._gauges)
        self.promises = Promises(settings.objectives, self.journal)
        self.controlling = Controlling(
            clock, lambda: self.promises.in_force, cells=self.cells, link=self.link, publish=self.events.publish,
            count=self.telemetry.count, kept=self.journal.state(CONTROLLER),
        )  # fmt: skip
        self.registry.plans = self.controlling.asked
        self.estimating = Estimating(self.events.publish, clock)
        self.probing = Probing(settings, clock.wall, self.telemetry, self.events.publish)
        self.forwarder: Forwarder | None = None
        self.run_id = f"{int(clock.wall() * 1000):x}"  # tells events and files of this run from those of others
        self.archiving = Archiving.of(settings, self.run_id, clock, self.telemetry)
        self.streams = 0  # clients of /v1/events
        self.ticked = (clock.monotonic(), clock.wall())
        self._limits = Limits(max_body=settings.max_body_bytes, max_decompressed=settings.max_decoded_bytes)
        self._decoding = asyncio.Lock()
        self._ticks = 0
        self._lag = 0.0

    async def receive(self, export: Export, *, big: bool, forward: bool) -> otlp.Batch:
        """Decodes an OTLP request and hands its spans to the join; a big one does not hold up the event loop.

        Raises:
            WireError: the request is broken or larger than the limits.
        """
        if big:
            async with self._decoding:  # one at a time: unpacked they take much memory, and threads gain no speed
                batch = await asyncio.to_thread(self._decode, export)
        else:
            batch = self._decode(export)
        now_ns = self._age_ns()
        for resource, spans in batch.groups:
            self._hook_totals(resource)
            self.joiner.add(resource, spans, now_ns)
        count = self.telemetry.count
        count(semconv.INGEST_SPANS, "accepted", by=batch.accepted)
        count(semconv.INGEST_SPANS, "rejected", by=batch.rejected)
        count(semconv.INGEST_SPANS, "ignored", by=batch.ignored)
        if self.forwarder and forward and batch.received:
            self.forwarder.offer(export._replace(spans=batch.received))
        return batch

    def tick(self) -> None:
        """One turn of the loop: join what is complete, count it, publish what changed."""
        now_ns = self._age_ns()
        for record in self.joiner.advance(now_ns):
            self.probing.stamp(record)
            self.window.add(record, now_ns)
            self.telemetry.observe(record)
            self.archiving.add(record)
            self.estimating.add(record)
            self.controlling.take(record)
            self.controlling.judge(record)
        for record in self.joiner.amended:
            self.probing.stamp(record)
            self.window.amend(record)
            self.telemetry.amend(record)
            self.estimating.add(record)
            self.controlling.take(record)
        self.window.expire(now_ns)
        counts = self.joiner.counts
        self._totals(semconv.INGEST_ORPHANS, counts.orphans)
        self._totals(semconv.INGEST_LOST, counts.evicted, "evicted")
        self._totals(semconv.INGEST_LOST, counts.overflow, "overflow")
        self.telemetry.set_total(semconv.ESTIMATE_LOST, value=self.estimating.lost)
        self.switches.expire()  # publishes when something ran out
        self.registry.publish(self.controlling.step(self.registry.asked()))
        if (kept := self.controlling.save()) is not None:
            self.journal.put_state(CONTROLLER, kept)
        for event in self.registry.news():
            self.events.publish(event)
        self.journal.flush()
        self.archiving.flush()
        self._ticks += 1
        if self._ticks % _SWEEP_TICKS == 0:
            self.registry.forget_silent()
            self.telemetry.forget_idle()
        self.ticked = (self.clock.monotonic(), self.clock.wall())

    async def run(self) -> None:
        """Ticks until cancelled; an error costs one tick."""
        while True:
            try:
                self.tick()
            except Exception:  # the loop's outermost frame
                log.exception("tick_failed")
            due = self.clock.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._lag = max(self._lag, self.clock.monotonic() - due)

    def cells(self) -> Sequence[Cell]:
        """What was estimated last, by model, backend and class."""
        return self.estimating.cells()

    def link(self, backend: str) -> Link:
        """The idle RTT of a backend now, and whether its probes are answered."""
        return self.probing.link(backend)

    def end_waits(self) -> None:
        """Ends every long poll and event stream, now and from now on: the service stops."""
        self.registry.close()
        self.events.close()

    async def close(self) -> None:
        """Writes what must outlive the process and closes the ledger."""
        await self.switches.close()
        await self.journal.close()
        await self.archiving.close()

    def _told(self, event: Event) -> None:
        self.telemetry.count(semconv.EVENTS_TOTAL, event.kind)
        if event.kind in _OWN_DEEDS:
            self.journal.note(event)

    def _decode(self, export: Export) -> otlp.Batch:
        return otlp.decode(
            export.body,
            content_type=export.content_type,
            content_encoding=export.content_encoding,
            limits=self._limits,
            now_ns=int(self.clock.wall() * 1e9),
        )

    def _totals(self, metric: Metric, by_kind: Mapping[str, int], *labels: str) -> None:
        for kind, total in by_kind.items():
            self.telemetry.set_total(metric, kind, *labels, value=total)

    def _age_ns(self) -> int:
        """What watermark and window go by: monotonic, so that a step of the wall clock neither closes nor stalls."""
        return int(self.clock.monotonic() * 1e9)

    def _hook_totals(self, resource: Mapping[str, AttributeValue]) -> None:
        process = tuple(str(resource.get(name, "")) for name in _PROCESS)
        engine_id = str(resource.get(semconv.ENGINE_ID) or resource.get(semconv.SERVICE_INSTANCE_ID) or "unknown")
        self.telemetry.hook_totals(engine_id, process, resource)
        self.controlling.hook(engine_id, process, resource)

    def _gauges(self) -> Iterator[tuple[Metric, Sequence[str], float]]:
        now = self.clock.wall()
        for engine in list(self.registry.engines.values()):  # scraped on a thread
            poll = engine.poll
            instance, _, rank = poll.engine_id.rpartition("/")
            yield semconv.ENGINE_INFO, (poll.engine_id, poll.instance or instance, rank, poll.model), 1.0
            yield semconv.DIRECTIVE_AGE, (poll.engine_id,), self.registry.age(engine)
            for backend in poll.backends:
                override = self.switches.overrides.resolve(poll.engine_id, poll.model, backend, now)
                asked = override.mode if override else self.settings.default_mode
                yield semconv.OFFLOAD_MODE, (poll.model, poll.engine_id, backend, asked), 1.0
        yield from gauges(self.controlling)
        yield from self.estimating.gauges()
        yield from self.probing.gauges()
        yield semconv.JOIN_PENDING, (), float(self.joiner.pending)
        yield semconv.LOOP_LAST_RUN, (), self.ticked[1]
        yield semconv.LOOP_LAG, (), self._lag
        self._lag = 0.0


_OWN_DEEDS: Final = (semconv.EVENT_CONTROLLER, semconv.EVENT_SLA)  # the history keeps them, with their evidence
_PROCESS: Final = (semconv.HOST_NAME, semconv.SERVICE_INSTANCE_ID, semconv.PROCESS_PID)
