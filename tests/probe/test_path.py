"""O_DIRECT reads: refused where they mean nothing, and as fast as fio's."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from statistics import median

import pytest

from guard.probe.path import FILE, file_system
from guard.probe.prober import Target
from guard.probe.registry import make

pytestmark = pytest.mark.quiet


def prober(path: object):
    return make(Target(target=str(path), prober="path"))


@pytest.fixture
def file(tmp_path, needs) -> Path:
    kind = file_system(tmp_path.stat().st_dev)
    needs(problem="temporary files lie in memory" if kind in ("tmpfs", "ramfs") else "")
    path = tmp_path / FILE
    path.write_bytes(os.urandom(16 << 20))
    os.sync()
    return path


def test_a_file_and_its_directory(file):
    for target in (file, file.parent, f"file://{file}"):
        made = prober(target)
        sample = made.probe(4, 5.0)
        made.close()
        made.close()
        assert (len(sample.rtts), sample.sent, sample.problem) == (4, 4, "")
        assert all(0 < rtt < 5 for rtt in sample.rtts)


def test_nothing_is_written(file):
    before = file.stat()
    prober(file).probe(4, 5.0)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_file_that_shrinks_is_told_and_opened_again(file):
    made = prober(file)
    assert made.probe(2, 5.0).sent == 2
    os.truncate(file, 4096)
    assert "shorter" in made.probe(50, 5.0).problem
    assert made.probe(2, 5.0).problem == ""


def test_no_file_says_how_to_make_one(tmp_path):
    sample = prober(tmp_path).probe(4, 1.0)
    assert (sample.rtts, sample.sent) == ((), 0)
    assert f"head -c 64M /dev/urandom > {tmp_path}/{FILE}" in sample.problem


def test_too_small_and_not_a_file(tmp_path):
    (tmp_path / "small").write_bytes(b"x")
    assert "at least 4096 bytes" in prober(tmp_path / "small").probe(1, 1.0).problem


def test_memory_is_no_device():
    if not Path("/dev/shm").is_dir() or file_system(Path("/dev/shm").stat().st_dev) != "tmpfs":  # noqa: S108
        pytest.skip("there is no file system in memory here")
    path = Path(f"/dev/shm/kvguard-test-{os.getpid()}")  # noqa: S108
    path.write_bytes(bytes(8192))
    try:
        sample = prober(path).probe(1, 1.0)
        assert (sample.rtts, sample.sent) == ((), 0)
        assert "lies in memory" in sample.problem or "refuses O_DIRECT" in sample.problem
    finally:
        path.unlink()


def test_a_file_system_that_refuses_o_direct():
    sample = prober("/proc/kallsyms").probe(1, 1.0)
    assert sample.sent == 0
    assert "refuses O_DIRECT" in sample.problem


def fio(file: Path, seconds: float) -> float:
    """Median latency of fio's reads of the same kind, in seconds."""
    program = shutil.which("fio") or "fio"
    done = subprocess.run(
        [program, "--name=probe", f"--filename={file}", "--rw=randread", "--bs=4k", "--direct=1", "--ioengine=psync",
         "--iodepth=1", "--time_based", f"--runtime={seconds}", "--readonly", "--output-format=json"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    data = json.loads(done.stdout[done.stdout.index("{") :])
    return float(data["jobs"][0]["read"]["clat_ns"]["percentile"]["50.000000"]) / 1e9


def test_the_median_is_fios_within_15_percent(file, needs, record_property):
    needs("fio")
    made = prober(file)
    ours, theirs = [], []
    for _ in range(5):  # in turn, so that both meet the same neighbours
        theirs.append(fio(file, 1.0))
        ours.append(median(made.probe(2000, 5.0).rtts))
    made.close()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    record_property("ours_us", [round(value * 1e6, 1) for value in ours])
    record_property("fio_us", [round(value * 1e6, 1) for value in theirs])
    assert 0.85 <= median(ratios) <= 1.15, (ours, theirs)
