"""A child process that answers one JSON line to each: deadlines on everything, what it said last if it dies."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_ANSWER: Final = 1 << 20
KEPT_STDERR: Final = 2000
END_SECONDS: Final = 2.0


class ProgramError(Exception):
    """The program ended, or does not speak the protocol; the text says how."""


class Program:
    """A running program. Not for use by several threads at once."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=None if environment is None else dict(environment), bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ProgramError(f"cannot start {command[0]}: {error.strerror}") from None
        self._held = b""
        self._stderr = b""
        self._selector = selectors.DefaultSelector()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message.

        Raises:
            ProgramError: the program has ended.
        """
        stdin = self._process.stdin
        try:
            if stdin is None:
                raise BrokenPipeError
            stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise ProgramError(self._how_it_ended()) from None

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The program's next message; None where none comes within `seconds`.

        Raises:
            ProgramError: the program has ended, or says what is no JSON object.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._held:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if key.fileobj is self._process.stderr:
                    self._stderr = (self._stderr + data)[-KEPT_STDERR:]
                    if not data:
                        self._selector.unregister(key.fileobj)
                elif data:
                    self._held += data
                else:
                    raise ProgramError(self._how_it_ended())
            if len(self._held) > MAX_ANSWER:
                raise ProgramError("it said too much")
        line, _, self._held = self._held.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ProgramError(f"it said {line[:80]!r}")
        return message

    def end(self) -> None:
        """Ends the program and all its children, by force if it must be; may be called twice."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the group is its own: start_new_session
                process.wait()
        self._selector.close()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if self._process.stderr is not None and not self._process.stderr.closed:
            with contextlib.suppress(OSError):
                self._stderr = (self._stderr + (self._process.stderr.read() or b""))[-KEPT_STDERR:]
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        by = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"it ended {by}" + (f": {lines[-1]}" if lines else "")
