"""Files of requests: whole or not there, bounded, pruned."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest

from guard.errors import LedgerError
from guard.history.parquet import UNFINISHED, Archive
from tests.history.requests import history

AT = 1_800_000_000.0  # 2027-01-15
DAY = 86_400.0


def names(place: Path) -> list[str]:
    return sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "h", "run", max_days=14, max_bytes=1 << 30)
    first, second = history(50, 1), history(70, 2)
    assert archive.write([first, second], AT) == 120
    assert names(tmp_path / "h") == ["day=2027-01-15/20270115T080000-run-1.parquet"]
    (file,) = (tmp_path / "h").rglob("*.parquet")
    assert pl.read_parquet(file, hive_partitioning=False).equals(pl.concat([first, second]))


def test_old_days_go_and_then_the_oldest_files_beyond_the_bound(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "run", max_days=3, max_bytes=1 << 30)
    for day in range(6):
        archive.write([history(50, day)], AT + day * DAY)
    archive.prune(AT + 5 * DAY)
    assert [name[4:14] for name in names(tmp_path)] == ["2027-01-17", "2027-01-18", "2027-01-19", "2027-01-20"]
    assert not (tmp_path / "day=2027-01-15").exists()
    size = next(tmp_path.rglob("*.parquet")).stat().st_size
    small = Archive(tmp_path, "run2", max_days=3, max_bytes=int(2.5 * size))
    small.prune(AT + 5 * DAY)
    assert [name[4:14] for name in names(tmp_path)] == ["2027-01-19", "2027-01-20"]


def test_what_others_left_unfinished_goes_when_it_is_old_and_what_they_write_now_stays(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "run", max_days=300, max_bytes=1 << 30)
    archive.write([history(10, 1)], AT)
    folder = tmp_path / "day=2027-01-15"
    for name, age in (("dead", 7200.0), ("alive", 5.0)):
        file = folder / f"x-{name}-1{UNFINISHED}"
        file.write_bytes(b"PAR1")
        os.utime(file, (AT - age, AT - age))
    archive.prune(AT)
    assert [name for name in names(tmp_path) if UNFINISHED in name] == [f"day=2027-01-15/x-alive-1{UNFINISHED}"]


def test_kill_9_leaves_whole_files_only(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from guard.history.parquet import Archive
        from tests.history.requests import history
        archive = Archive(Path({str(tmp_path)!r}), "run", max_days=14, max_bytes=1 << 30)
        frame = history(20_000, 1)
        print("ready", flush=True)
        while True:
            archive.write([frame], {AT})
            print("written", flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = 3 + process.stdout.read().count("written")
    process.wait()
    process.stdout.close()
    files = list(tmp_path.rglob("*.parquet"))
    assert len(files) in (told, told + 1)
    assert {pl.scan_parquet(file).select(pl.len()).collect().item() for file in files} == {20_000}


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import resource, signal
        from pathlib import Path
        from guard.errors import LedgerError
        from guard.history.parquet import Archive
        from tests.history.requests import history
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        archive = Archive(Path({str(tmp_path)!r}), "run", max_days=14, max_bytes=1 << 30)
        frame = history(20_000, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            archive.write([frame], {AT})
        except LedgerError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert f"history directory {tmp_path}: " in done.stdout, done.stderr
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"history directory .*file/h: Not a directory"):
        Archive(tmp_path / "file" / "h", "run", max_days=1, max_bytes=1 << 20)
