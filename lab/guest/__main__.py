"""`python -m lab.guest test|run`: RDMA tests in the guest, or any command there."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.errors import LabError
from lab.guest import kernel, machine


def main(arguments: list[str]) -> int:
    """Exit code of what ran in the guest; 0 where it cannot run here, with the reason, except in CI."""
    parser = argparse.ArgumentParser(prog="python -m lab.guest", description=__doc__)
    parser.add_argument("what", choices=("test", "run"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="for pytest, or the command to run")
    options = parser.parse_args(arguments)
    try:
        reason = _prepare()
        if reason:
            print(f"SKIPPED: the RDMA guest cannot run here: {reason}")
            return 1 if os.environ.get("KVGUARD_CI") == "1" else 0
        built = kernel.build()
        if options.what == "test":
            return machine.test(built, options.words)
        with tempfile.TemporaryDirectory(prefix="kvguard-guest-") as out:
            return machine.run(built, options.words or ["sh"], Path(out), environment={}, seconds=900.0)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1


def _prepare() -> str:
    """Installs missing packages where it may; returns why the guest cannot run, or an empty string."""
    if os.uname().machine != "x86_64":
        return f"it is an x86-64 machine, this is {os.uname().machine}"
    packages = machine.missing()
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *command], env=environment, capture_output=True, check=False, timeout=300)
        packages = machine.missing()
    return f"Debian packages missing: {', '.join(packages)}" if packages else ""


sys.exit(main(sys.argv[1:]))
