"""`python -m lab sweep`: `kvguard sweep` as an operator would start it, against the lab's own engine and link."""

import subprocess
import sys
from pathlib import Path

from lab.config import StackConfig
from lab.env import LabEnv
from lab.stack import Stack

NARROW = StackConfig(connector="lmcache-mp", chunk_size=128, l2_workers=1)
"""LMCache's server with one connection to the store and small chunks: many round trips in a row."""

TIERS = ("--rtts", "0,500us,1ms,2ms,5ms,10ms,20ms,40ms", "--concurrency", "1,4,8", "--requests", "8", "--repeats", "3")


def command(stack: Stack, out: Path, *more: str) -> list[str]:
    """The command for a running stack."""
    control = str(stack.injector.control)
    code = f"import sys; from lab.injector.control import Injector; Injector({control!r}).rtt(int(sys.argv[1]))"
    return [
        sys.executable, "-m", "guard.cli", "sweep", "--engine", f"http://127.0.0.1:{stack.client.port}",
        "--endpoint", stack.service.url, "--injector", f'command:{sys.executable} -c "{code}" {{us}}',
        "--prompt-tokens", "1300", "--out", str(out), *more,
    ]  # fmt: skip


def sweep(out: Path, built: LabEnv) -> int:
    """The whole table (about 20 minutes alone on two cores); returns the command's exit code."""
    with Stack(NARROW, built, say=print) as stack:
        return subprocess.run(command(stack, out, *TIERS), check=False).returncode
