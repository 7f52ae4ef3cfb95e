"""Programs that the lab takes from the system, and how to get them."""

import os
import shutil
import subprocess

from lab.errors import LabError

PACKAGES = {"redis-server": "redis-server", "ip": "iproute2", "gcc": "gcc", "unshare": "util-linux"}
"""Program -> Debian package that holds it."""


def need(*programs: str) -> None:
    """Makes sure that the programs exist; on Debian as root the missing ones are installed.

    Raises:
        LabError: some are missing and cannot be installed here; the text names program and package.
    """
    missing = _missing(programs)
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = sorted({PACKAGES[program] for program in missing})
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
            subprocess.run(command, env=environment, capture_output=True, check=False, timeout=300)
        missing = _missing(programs)
    if missing:
        what = ", ".join(f"{program} (Debian package {PACKAGES[program]})" for program in missing)
        raise LabError(f"missing on this machine: {what}. Install them and run the command again.")


def _missing(programs: tuple[str, ...]) -> list[str]:
    path = os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    return [program for program in programs if not shutil.which(program, path=path)]
