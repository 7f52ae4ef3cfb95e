"""Requests on their way into the history: held while they may still be amended, then written off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

import structlog

from guard import semconv
from guard.errors import ConfigError, LedgerError
from guard.history.parquet import Archive
from guard.metrics import Telemetry
from guard.service.directives import Clock
from guard.settings import Settings
from guard.wire import RequestRecord

if TYPE_CHECKING:
    import polars as pl

HELD_SECONDS: Final = 30.0
"""A request is taken when it is one to two times as old: what ends with it (decode, vLLM's view) is there."""

HELD_REQUESTS: Final = 20_000
"""Most requests of each of the two generations; under more load they are taken younger."""

MAX_YOUNG: Final = 5 * HELD_REQUESTS
"""Most requests that are held while the work before them is under way; a disk may hang. Those beyond are lost and
counted."""

MAX_ROWS: Final = 1_000_000
"""Rows that wait for a disk that refuses; beyond it the oldest are lost and counted."""


class Archiving:
    """Takes joined requests and writes a file every `rotate_seconds`. All but the work itself is in the event loop.

    Without an archive everything is let go at once.
    """

    def __init__(
        self, archive: Archive | None, clock: Clock, *, rotate_seconds: float, count: Callable[[str, int], None]
    ) -> None:
        """`count` is told how many rows were `written` and `lost`."""
        self.problem = ""  # of the last write; empty when it worked
        self._archive = archive
        self._clock = clock
        self._rotate = rotate_seconds
        self._count = count
        self._young: list[RequestRecord] = []
        self._old: list[RequestRecord] = []
        self._frames: list[pl.DataFrame] = []
        self._turned = self._written = clock.monotonic()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: Settings, run_id: str, clock: Clock, telemetry: Telemetry) -> Self:
        """What the settings ask for.

        Raises:
            ConfigError: `history_dir` cannot be written.
        """
        archive = None
        if settings.history_dir:
            days, size = settings.history_days, settings.history_max_bytes
            try:
                archive = Archive(settings.history_dir, run_id, max_days=days, max_bytes=size)
            except LedgerError as error:
                raise ConfigError("history_dir", str(error)) from None

        def count(outcome: str, rows: int) -> None:
            telemetry.count(semconv.HISTORY_ROWS, outcome, by=rows)

        return cls(archive, clock, rotate_seconds=settings.history_rotate_seconds, count=count)

    def add(self, record: RequestRecord) -> None:
        """Takes a joined request; it may be amended for a while yet."""
        if self._archive and len(self._young) < MAX_YOUNG:
            self._young.append(record)
        elif self._archive:
            self._count("lost", 1)

    def flush(self) -> None:
        """Begins the work that is due, unless some is under way."""
        now = self._clock.monotonic()
        due = now - self._turned >= HELD_SECONDS or len(self._young) >= HELD_REQUESTS
        if due and (self._task is None or self._task.done()):
            self._turned = now
            ripe, self._old, self._young = self._old, self._young, []
            self._task = asyncio.create_task(self._work(ripe, write=now - self._written >= self._rotate))

    async def close(self) -> None:
        """Writes everything that is held."""
        if self._task:
            await asyncio.wait([self._task])
        ripe, self._old, self._young = [*self._old, *self._young], [], []
        await self._work(ripe, write=True)

    async def _work(self, ripe: list[RequestRecord], *, write: bool) -> None:
        if ripe:
            self._frames.append(await asyncio.to_thread(_framed, ripe))
        while sum(one.height for one in self._frames) > MAX_ROWS:
            self._count("lost", self._frames.pop(0).height)
        if not (write and self._frames and self._archive):
            return
        self._written = self._clock.monotonic()
        try:
            rows = await asyncio.to_thread(self._write, self._archive, self._clock.wall())
        except LedgerError as error:
            if str(error) != self.problem:
                structlog.get_logger("guard.service.archiving").warning("history_failed", problem=str(error))
            self.problem = str(error)
            return
        self.problem = ""
        self._frames = []
        self._count("written", rows)

    def _write(self, archive: Archive, now: float) -> int:
        rows = archive.write(self._frames, now)
        archive.prune(now)
        return rows


def _framed(records: list[RequestRecord]) -> "pl.DataFrame":
    from guard.correlate.frame import frame  # polars, which takes long to load: here, on the thread

    return frame(records)
