"""Requests on their way to the history: amended while they are held, written in time, lost only when told."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from guard.errors import ConfigError, LedgerError
from guard.history.parquet import Archive
from guard.service import archiving as module
from guard.service.archiving import HELD_SECONDS, Archiving
from guard.service.runtime import Runtime
from guard.settings import Settings
from tests.service.routes.test_request_list import record

pytestmark = pytest.mark.anyio


class Refusing(Archive):
    """An archive that can be told to refuse."""

    refuses = False

    def write(self, *arguments: Any) -> int:
        if self.refuses:
            raise LedgerError("history directory x: No space left on device")
        return super().write(*arguments)


@pytest.fixture
def archive(tmp_path: Path) -> Refusing:
    return Refusing(tmp_path / "h", "run", max_days=14, max_bytes=1 << 30)


def files(place: Path) -> list[pl.DataFrame]:
    return [pl.read_parquet(file, hive_partitioning=False) for file in sorted(place.rglob("*.parquet"))]


async def turn(archiving: Archiving, hands: Any, seconds: float) -> None:
    hands.advance(seconds)
    archiving.flush()
    if archiving._task:
        await archiving._task


async def test_a_request_is_written_as_it_was_amended(archive: Refusing, hands: Any, tmp_path: Path) -> None:
    counted: list[tuple[str, int]] = []
    archiving = Archiving(archive, hands.clock(), rotate_seconds=60, count=lambda *told: counted.append(told))
    one = record(1)
    archiving.add(one)
    await turn(archiving, hands, HELD_SECONDS)
    one.output_tokens = 77  # its decode span has come
    archiving.add(record(2))
    await turn(archiving, hands, HELD_SECONDS - 1)
    assert files(tmp_path) == []
    await turn(archiving, hands, 1)
    (frame,) = files(tmp_path)
    assert frame.select("internal_id", "output_tokens").rows() == [("r1", 77)]
    await archiving.close()
    assert [one["internal_id"].to_list() for one in files(tmp_path)] == [["r1"], ["r2"]]
    assert counted == [("written", 1), ("written", 1)]


async def test_a_disk_that_refuses_costs_the_oldest_rows_and_is_told(
    archive: Refusing, hands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 5)
    counted: list[tuple[str, int]] = []
    archiving = Archiving(archive, hands.clock(), rotate_seconds=1, count=lambda *told: counted.append(told))
    archive.refuses = True
    for number in range(6):
        for index in range(2):
            archiving.add(record(10 * number + index))
        await turn(archiving, hands, HELD_SECONDS)
    assert archiving.problem == "history directory x: No space left on device"
    assert counted == [("lost", 2)] * 3
    archive.refuses = False
    await archiving.close()
    assert archiving.problem == ""
    assert [one.height for one in files(tmp_path)] == [4]  # the last two generations
    assert counted[3:] == [("lost", 2), ("written", 4)]


async def test_a_disk_that_hangs_does_not_fill_the_memory(
    archive: Refusing, hands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_YOUNG", 3)
    counted: list[tuple[str, int]] = []
    archiving = Archiving(archive, hands.clock(), rotate_seconds=60, count=lambda *told: counted.append(told))
    for number in range(5):
        archiving.add(record(number))
    assert counted == [("lost", 1)] * 2
    await archiving.close()
    assert counted[2:] == [("written", 3)]


async def test_the_service_writes_what_it_joined_when_it_stops(
    settings: Settings, make_runtime: Any, tmp_path: Path
) -> None:
    runtime: Runtime = make_runtime(settings.model_copy(update={"history_dir": tmp_path / "h"}))
    runtime.archiving.add(record(1))
    await runtime.close()
    assert [one["internal_id"].to_list() for one in files(tmp_path)] == [["r1"]]


async def test_without_a_directory_nothing_is_held(runtime: Runtime) -> None:
    runtime.archiving.add(record(1))
    assert runtime.archiving._young == []
    await runtime.close()


async def test_a_directory_that_cannot_be_used_names_the_setting(
    settings: Settings, make_runtime: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="history_dir"):
        make_runtime(settings.model_copy(update={"history_dir": tmp_path / "file" / "h"}))
