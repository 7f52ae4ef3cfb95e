"""One child process of the lab: its log, its health, its end."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from lab.errors import LabError

STOP_SECONDS = 15.0
"""How long a process may take to end after SIGTERM before its group gets SIGKILL."""


CAUSE = re.compile(r"\b\w*(Error|Exception): ")
"""A line of a log that names an exception: the root cause is often far above the end."""


class Process:
    """A program with a log file, in its own process group; a context manager that waits for health and stops it.

    Args:
        name: what people call it, and the stem of its log file.
        command: program and arguments.
        run_dir: where `NAME.log` goes.
        ready: asked every 0.1 s until true; None means that a started process is a ready one.
        timeout: seconds until it must be ready.
        env: variables on top of the lab's own; a value of None removes one. A change counts from the next start.
        hint: what to check when it does not start.
        netns: path of the network namespace to start in, None for the lab's own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        run_dir: Path,
        *,
        ready: Callable[[], bool] | None = None,
        timeout: float = 30.0,
        env: Mapping[str, str | None] | None = None,
        hint: str = "",
        netns: Path | None = None,
    ) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log = run_dir / f"{name}.log"
        self._pid_file = run_dir / f"{name}.pid"
        self.hint = hint
        self._ready = ready
        self._timeout = timeout
        self.env = dict(env or {})
        self._netns = netns
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id; the group has the same number."""
        if self._popen is None:
            raise LabError(f"{self.name} is not started")
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs (a stopped one does)."""
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Starts the program and waits until it is ready.

        Raises:
            LabError: it ended or was not ready in time; the text holds its last log lines.
        """
        env = {**os.environ, **self.env}
        command = ["nsenter", f"--net={self._netns}", *self.command] if self._netns else self.command
        if not shutil.which(self.command[0], path=env.get("PATH")):
            raise LabError(f"{self.name}: there is no program {self.command[0]}. {self.hint}")
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                env={key: value for key, value in env.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid_file.write_text(str(self._popen.pid))
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._timeout
        while self._ready is not None and not self._ready():
            if not self.alive:
                raise LabError(self._story(f"ended with code {self._popen.returncode}"))
            if time.monotonic() > deadline:
                raise LabError(self._story(f"was not ready after {self._timeout:g} s"))
            time.sleep(0.1)

    def _story(self, what: str) -> str:
        named = [
            line[:300]
            for line in self.log.read_text(errors="replace").splitlines()
            if CAUSE.search(line) and "WARNING" not in line
        ]
        causes = "\n".join(["--- errors it named", *dict.fromkeys(named[:8])]) if named else ""
        return f"{self.name} {what}. {self.hint}\n--- last lines of {self.log}\n{self.tail()}\n{causes}"

    def tail(self, lines: int = 25) -> str:
        """The last lines of its log."""
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Sends a signal to the process, or to its whole group: SIGKILL, SIGSTOP, SIGCONT in chaos tests."""
        (os.killpg if group else os.kill)(self.pid, number)

    def descendants(self) -> list[int]:
        """Process ids of all that it started, itself first, parents before children."""
        found = [self.pid]
        for parent in found:
            for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += [int(pid) for pid in tasks.read_text().split()]
        return found

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of its group. Bounded in time, safe to call twice."""
        if self._popen is None:
            return
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait(STOP_SECONDS)
        self._pid_file.unlink(missing_ok=True)
        self._popen = None


@contextlib.contextmanager
def janitor(run_dir: Path) -> Iterator[None]:
    """Stops what is left in `run_dir` should this process be killed with no chance to do so itself.

    A shell that waits for its standard input to end, which is when we do, and then kills every process group that still
    has a pid file; after an orderly stop there is none. (A death signal to each child is not enough: vLLM while it
    starts does not act on SIGTERM, and its engine core outlives it.)
    """
    script = 'cat; for file in "$0"/*.pid; do [ -e "$file" ] && kill -KILL "-$(cat "$file")"; rm -f "$file"; done'
    shell = subprocess.Popen(["sh", "-c", script, str(run_dir)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        shell.stdin.close()
        shell.wait(STOP_SECONDS)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def http_ok(url: str) -> Callable[[], bool]:
    """A health check: whether `GET url` answers 200 within 2 s."""

    def check() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    return check


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Waits for a condition, asking every 20 ms.

    Raises:
        LabError: it is still false after `timeout` seconds; the text names `what`.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.02)
