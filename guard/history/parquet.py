"""Requests as Parquet files in folders by day, within a bound on age and bytes. The columns are those of the window.

    DIR/day=2026-12-01/20261201T101500-RUN-7.parquet

A file is written under another name, flushed to disk and renamed: whoever reads the folder sees whole files only, also
after kill -9. Names sort by time.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from guard.errors import LedgerError

if TYPE_CHECKING:
    import polars as pl

UNFINISHED: Final = ".unfinished"


class Archive:
    """One writer's view of a history directory; several may share it. Calls block for the disk."""

    def __init__(self, directory: Path, run_id: str, *, max_days: float, max_bytes: int) -> None:
        """Makes the directory and removes what an earlier run of this writer left unfinished.

        Raises:
            LedgerError: it cannot be written.
        """
        self._directory = directory
        self._run_id = run_id
        self._max_days = max_days
        self._max_bytes = max_bytes
        self._number = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = directory / f"{run_id}{UNFINISHED}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise self._error(error) from None

    def write(self, frames: Sequence["pl.DataFrame"], at: float) -> int:
        """Writes the rows as one file, named after Unix time `at`; returns how many there were.

        Raises:
            LedgerError: it could not be written; nothing of it is left.
        """
        import polars as pl  # loaded by whoever made the frames; an archive without any needs none

        rows = pl.concat(frames)
        when = datetime.fromtimestamp(at, UTC)
        self._number += 1
        folder = self._directory / f"day={when:%Y-%m-%d}"
        place = folder / f"{when:%Y%m%dT%H%M%S}-{self._run_id}-{self._number}.parquet"
        temporary = place.with_suffix(UNFINISHED)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            try:
                rows.write_parquet(temporary)
                _flush(temporary)
                temporary.rename(place)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _flush(folder)
        except (OSError, pl.exceptions.PolarsError) as error:  # polars wraps what the file system says
            raise self._error(error) from None
        return rows.height

    def prune(self, now: float) -> None:
        """Deletes days older than the retention, then the oldest files until all fit the bound.

        Raises:
            LedgerError: something cannot be deleted.
        """
        first_day = datetime.fromtimestamp(now, UTC) - timedelta(days=self._max_days)
        oldest_kept = f"day={first_day:%Y-%m-%d}"
        try:
            files = [(file, file.stat().st_size) for file in sorted(self._directory.glob("day=*/*"))]
            left = sum(size for _, size in files)
            for file, size in files:
                if file.parent.name < oldest_kept or left > self._max_bytes:
                    file.unlink(missing_ok=True)
                    left -= size
                elif file.suffix == UNFINISHED and self._run_id not in file.name and _age(file, now) > 3600.0:
                    file.unlink(missing_ok=True)
            for folder in self._directory.glob("day=*"):
                if folder.name < oldest_kept and not any(folder.iterdir()):
                    folder.rmdir()
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> LedgerError:
        return LedgerError(f"history directory {self._directory}: {getattr(error, 'strerror', None) or error}")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _age(file: Path, now: float) -> float:
    return now - file.stat().st_mtime
