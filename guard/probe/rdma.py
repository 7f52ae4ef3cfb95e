"""RDMA READ latency over InfiniBand, RoCEv2 or iWARP, measured by a program that runs under a Python with pyverbs.

Target: `rdma://host[:port]` of a `kvguard probe serve --rdma DEV`. Keys of its own: `device` (needed only where
several could serve), `gid_index`, `source` (local address to leave from), `completion` (`poll`, the default and
exact, or `event`, which sleeps and adds the wake-up to each RTT), `interpreter`.

pyverbs usually belongs to the distribution's Python, not to the one that runs the service, and blocks with the
interpreter's lock held in places. So it lives in a process of its own (`rdma_verbs/`): whatever it does, crash or hang,
the service reads a pipe with a deadline.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from guard.errors import ConfigError
from guard.probe.endpoint import Dialer, Endpoint, explain, parse
from guard.probe.prober import Kind, Prober, Sample, Target
from guard.probe.rdma_program import Program, ProgramError

DEFAULT_PORT: Final = 18515
VERBS: Final = Path(__file__).with_name("rdma_verbs")
START_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 0.5
BACKOFF_SECONDS: Final = (1.0, 60.0)
DISTRIBUTION_PYTHON: Final = "/usr/bin/python3"
UNLOADABLE: Final = frozenset({"pyverbs-absent", "pyverbs-broken", "wrong-abi"})
"""Codes that another interpreter may answer better."""
LOCAL: Final = UNLOADABLE | {"no-device", "port-down", "no-gid", "wrong-gid", "verbs-error"}
"""Codes that say nothing about the target: such a round counts as not measured, not as lost."""


def interpreters(configured: str = "") -> tuple[str, ...]:
    """The interpreters to try, in order: the configured one alone, else this one and the distribution's."""
    return (configured,) if configured else (sys.executable, DISTRIBUTION_PYTHON)


def environment() -> dict[str, str]:
    """The child's environment: without what would turn another interpreter into this one."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONSTARTUP")}


def command(interpreter: str, *words: str) -> list[str]:
    """The command line of the verbs program."""
    return [interpreter, "-u", str(VERBS), *words]


class RdmaProber:
    """Keeps the program running and asks it for READs; starts it anew, with back-off, when it ended or hung."""

    def __init__(
        self,
        dialer: Dialer,
        endpoint: Endpoint,
        options: Mapping[str, Any],
        candidates: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dialer, self._endpoint, self._options = dialer, endpoint, options
        self._candidates = candidates
        self._clock = clock
        self._chosen = 0
        self._program: Program | None = None
        self._ready = False
        self._started = 0.0
        self._retry_at = 0.0
        self._backoff = BACKOFF_SECONDS[0]
        self._problem = ""
        self._told: list[str] = []
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the program, None while it does not run."""
        return self._program.pid if self._program else None

    def probe(self, count: int, timeout: float) -> Sample:
        """READs one after the other; the round returns within `count * timeout` and half a second."""
        deadline = self._clock() + count * timeout
        if self._clock() < self._retry_at:
            return Sample(problem=self._problem)
        try:
            program = self._start(deadline)
            if program is None:
                return Sample(problem=self._problem)
            host = self._dialer.addresses()[0][1][0]
            program.send({**self._options, "host": host, "port": self._endpoint.port, "count": count,
                          "timeout": timeout, "budget": max(0.1, deadline - self._clock())})  # fmt: skip
            answer = program.receive(deadline - self._clock() + GRACE_SECONDS)
        except ProgramError as error:
            return self._stop(f"the verbs program failed: {error}")
        except OSError as error:
            return Sample(sent=1, problem=explain(error, "resolve"))
        if answer is None:
            self._stop("")
            return Sample(sent=1, problem="dead-wire: the verbs program hung in the library and was ended; "
                          "is the target up and the path clear?")  # fmt: skip
        self._backoff = BACKOFF_SECONDS[0]
        return _sample(answer)

    def close(self) -> None:
        """Ends the program."""
        program, self._program, self._ready = self._program, None, False
        if program is not None:
            program.end()

    def _start(self, deadline: float) -> Program | None:
        """The program once it is ready; None, with `_problem` set, while it is not or where it cannot be."""
        while True:
            if self._program is None:
                self.starts += 1
                self._program, self._started = Program(command(self._python, "measure"), environment()), self._clock()
            if self._ready:
                return self._program
            hello = self._program.receive(deadline - self._clock())
            if hello is None:
                self._problem = f"starting {self._python}"
                if self._clock() - self._started > START_SECONDS:
                    self._stop(f"pyverbs-broken: {self._python} did not load pyverbs in {START_SECONDS:g} s")
                return None
            if hello.get("ok"):
                self._ready = True
                self._told.clear()
                return self._program
            self.close()
            self._told.append(_words(hello))
            if hello.get("code") not in UNLOADABLE or self._chosen + 1 == len(self._candidates):
                # The last interpreter is the distribution's: what it says is nearest to a remedy.
                told, self._told = self._told, []
                self._chosen = 0
                self._stop(told[-1])
                return None
            self._chosen += 1

    @property
    def _python(self) -> str:
        return self._candidates[self._chosen]

    def _stop(self, problem: str) -> Sample:
        self.close()
        self._problem = problem
        self._retry_at = self._clock() + self._backoff
        self._backoff = min(2.0 * self._backoff, BACKOFF_SECONDS[1])
        return Sample(problem=problem)


def _sample(answer: Mapping[str, Any]) -> Sample:
    rtts = tuple(map(float, answer.get("rtts", ())))
    sent = int(answer.get("sent", 0))
    if answer.get("ok"):
        return Sample(rtts=rtts, sent=sent)
    return Sample(rtts=rtts, sent=sent if answer.get("code") in LOCAL else max(sent, 1), problem=_words(answer))


def _words(answer: Mapping[str, Any]) -> str:
    """What went wrong and what to do about it."""
    return f"{answer.get('code')}: {answer.get('message')}" + (f". {hint}" if (hint := answer.get("hint")) else "")


def make(target: Target, clock: Callable[[], float] = time.monotonic) -> Prober:
    """The prober of a target."""
    endpoint = parse(target, {"rdma": DEFAULT_PORT})
    completion = target.text("completion", "poll")
    if completion not in ("poll", "event"):
        raise ConfigError("completion", f"{completion!r} is not poll or event (target {target.target})")
    interpreter = target.text("interpreter")
    if interpreter and shutil.which(interpreter) is None:
        raise ConfigError("interpreter", f"{interpreter!r} is no program (target {target.target})")
    options = {
        "device": target.text("device"),
        "source": target.text("source"),
        "gid_index": int(target.number("gid_index", 0, low=0, high=255)) if "gid_index" in target.options else None,
        "event": completion == "event",
    }
    candidates = interpreters(interpreter)
    return RdmaProber(Dialer(endpoint, target.resolve), endpoint, options, candidates, clock)


# A READ and its answer, each with the acknowledgements of iWARP's TCP connection.
KIND: Final = Kind(make, frozenset({"device", "gid_index", "source", "completion", "interpreter"}), lambda _: 4)
