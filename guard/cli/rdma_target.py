"""`kvguard probe serve --rdma DEV`: be the passive target of RDMA probes, until SIGTERM or Ctrl-C."""

import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from guard.cli.errors import FAILED, fail
from guard.probe.rdma import UNLOADABLE, command, environment, interpreters
from guard.probe.rdma_program import Program, ProgramError

LOOK_SECONDS = 3600.0


class _Stop(Exception):  # noqa: N818 - a signal, not an error
    """SIGTERM or SIGINT came."""


def serve(device: str, bind: str, port: int, sessions: int, gid_index: int | None, interpreter: str) -> None:
    """Runs the target under the first interpreter that has pyverbs; tells on stderr who comes and goes."""
    words = ["serve", "--device", device, "--bind", bind, "--port", str(port), "--sessions", str(sessions)]
    if gid_index is not None:
        words += ["--gid-index", str(gid_index)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    candidates = interpreters(interpreter)
    for python in candidates:
        program: Program | None = None
        try:
            program = Program(command(python, *words), environment())
            trouble = _relay(program)
        except ProgramError as error:
            fail(f"the verbs program failed under {python}: {error}")
        except _Stop:
            return
        finally:
            if program is not None:
                program.end()
        if trouble.get("code") not in UNLOADABLE or python == candidates[-1]:
            fail(f"{trouble.get('code')}: {trouble.get('message')}", str(trouble.get("hint", "")), code=FAILED)


def _relay(program: Program) -> dict[str, Any]:
    """Passes on what the target tells, until it cannot go on; returns why."""
    while True:
        said = program.receive(LOOK_SECONDS)
        if said is None:
            continue
        if "event" not in said:
            return said
        text = {
            "listening": "listening on {address[0]}:{address[1]}, device {device}; sessions may read 16 bytes, no more",
            "opened": "session {session} from {peer}",
            "closed": "session {session} has ended",
            "refused": "refused {peer}: too many sessions",
            "failed": "session {session} failed: {code}: {message}",
        }.get(said["event"], "{event}")
        sys.stderr.write(text.format(**said) + "\n")


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _Stop
