"""4 KiB reads with O_DIRECT from a mounted tier: NVMe-oF, NFS, or the local NVMe as the baseline.

Target: a file, or a directory that holds a file `.kvguard-probe`. Reads go to random blocks of it, so that no cache
above the device answers; nothing is ever written.
"""

import errno
import mmap
import os
import random
import stat
import time
from pathlib import Path
from typing import Final

from guard.errors import ConfigError
from guard.probe.prober import Kind, Prober, Sample, Target

BLOCK: Final = 4096
FILE: Final = ".kvguard-probe"
_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})


class PathReads:
    """Holds the file open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._blocks = 0
        self._buffer = mmap.mmap(-1, BLOCK)  # O_DIRECT wants memory that is aligned; a mapping is
        self._random = random.Random()  # noqa: S311 - which block is no secret

    def probe(self, count: int, timeout: float) -> Sample:
        """Reads one after the other. A read that takes longer than `timeout` is lost; it cannot be cut short."""
        rtts: list[float] = []
        try:
            problem = self._open()
            if problem:
                return Sample(problem=problem)
            for sent in range(1, count + 1):
                offset = BLOCK * self._random.randrange(self._blocks)
                start = time.perf_counter()
                read = os.preadv(self._fd, [self._buffer], offset)
                seconds = time.perf_counter() - start
                if read < BLOCK or seconds > timeout:
                    problem = "the file has become shorter" if read < BLOCK else f"a read took {seconds:.3f} s"
                    self._release()
                    return Sample(rtts=tuple(rtts), sent=sent, problem=f"{self._path}: {problem}")
                rtts.append(seconds)
        except OSError as error:
            refused = error.errno == errno.EINVAL
            self._release()
            why = "its file system refuses O_DIRECT, so that a cache would answer" if refused else error.strerror
            return Sample(rtts=tuple(rtts), sent=0 if refused else len(rtts) + 1, problem=f"{self._path}: {why}")
        return Sample(rtts=tuple(rtts), sent=count)

    def close(self) -> None:
        """Closes the file."""
        self._release()

    def _open(self) -> str:
        """Opens the file if it is not; returns why that makes no sense, or ""."""
        if self._fd >= 0:
            return ""
        path = self._path / FILE if self._path.is_dir() else self._path
        if not path.exists():
            return f"no file {path}: make one there, e.g. head -c 64M /dev/urandom > {path}"
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            kind = file_system(status.st_dev)
            if not stat.S_ISREG(status.st_mode) or status.st_size < BLOCK:
                return f"{path}: not a file of at least {BLOCK} bytes"
            if kind in _MEMORY:
                return f"{path}: lies in memory ({kind}), there is no device to measure"
            self._fd, self._blocks, fd = fd, status.st_size // BLOCK, -1
            return ""
        finally:
            if fd >= 0:
                os.close(fd)

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def file_system(device: int) -> str:
    """Type of the mounted file system with this device number (proc_pid_mountinfo(5)); empty where it is not listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for row in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = row.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""


def make(target: Target) -> Prober:
    """The prober of a target."""
    path = Path(target.target.removeprefix("file://"))
    if not path.is_absolute():
        raise ConfigError("target", f"{target.target!r} is not an absolute path; prober path takes /mount/file")
    return PathReads(path)


KIND: Final = Kind(make, packets=lambda _: 4)  # over NFS or NVMe/TCP: a request, the block, and their acknowledgements
