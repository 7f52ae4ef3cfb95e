"""Runs a command in the guest, on the host's own files (read-only), and brings back its exit code and output files."""

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lab.env import ROOT, cache_dir
from lab.errors import LabError
from lab.guest.kernel import Kernel

OUT = "/run/out"
"""Where the guest sees the directory `out`."""


def run(kernel: Kernel, command: Sequence[str], out: Path, *, environment: dict[str, str], seconds: float) -> int:
    """Boots the guest, runs the command in the repository's directory, copies its console to standard output.

    Args:
        kernel: from `lab.guest.kernel.build`.
        command: what to run; it sees the host's files, and `/run/out` is `out`.
        out: directory for what the command writes.
        environment: additions to the guest's environment.
        seconds: after so much of the host's time the guest is ended.

    Returns:
        The command's exit code.

    Raises:
        LabError: the guest did not come to an end, or died.
    """
    code = out / "code"
    code.unlink(missing_ok=True)
    (out / "command").write_text(shlex.join(command) + "\n")
    named = {"REPOSITORY": str(ROOT), "PYTHONPATH": str(ROOT), **environment}
    (out / "environment").write_text("".join(f"export {key}={shlex.quote(value)}\n" for key, value in named.items()))
    append = (
        f"console=ttyS0 panic=-1 quiet loglevel=3 tsc=reliable mitigations=off nokaslr RUN={ROOT / 'lab/guest/run.sh'}"
    )
    # One CPU whose clock is its instruction count: 2 ns each, whatever the host is doing. Asleep it follows the host.
    machine = [
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=single", "-smp", "1", "-icount", "shift=1,sleep=on",
        "-cpu", "max", "-m", "768", "-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot",
        "-nodefaults", "-net", "none",
        "-virtfs", "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={out},mount_tag=out,security_model=none",
        "-kernel", str(kernel.image), "-initrd", str(kernel.initrd), "-append", append,
    ]  # fmt: skip
    process = subprocess.Popen(machine, stdin=subprocess.DEVNULL, stdout=None, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise LabError(f"the guest was ended after {seconds:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not code.exists():
        raise LabError(f"the guest died before its command had ended (QEMU's exit code {process.returncode})")
    return int(code.read_text())


def missing() -> list[str]:
    """Programs and files that the guest needs and this machine does not have, as Debian packages."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    programs = {
        "qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "modprobe": "kmod", "cpio": "cpio",
        "ip": "iproute2", "rdma": "iproute2", "make": "make", "gcc": "gcc", "strip": "binutils", "xz": "xz-utils",
    }  # fmt: skip
    files = {
        "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
        "/usr/lib/x86_64-linux-gnu/libibverbs": "ibverbs-providers",
    }
    packages = [package for program, package in programs.items() if shutil.which(program, path=path) is None]
    packages += [package for name, package in files.items() if not Path(name).exists()]
    return sorted(set(packages))


def test(kernel: Kernel, arguments: Sequence[str]) -> int:
    """Runs tests/rdma/guest in the guest; further arguments go to pytest. Returns pytest's exit code."""
    full = os.environ.get("KVGUARD_RDMA_FULL") == "1"
    out = Path(tempfile.mkdtemp(prefix="kvguard-guest-"))
    # The guest is slow: no plugins, and not what the other tests share (hypothesis).
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rA", "--color=no", "--durations=8"]
    options = ["--confcutdir=tests/rdma/guest", f"--junitxml={OUT}/junit.xml"]
    environment = {
        "KVGUARD_RDMA_FULL": "1" if full else "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    started, earlier = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    before = earlier.ru_utime + earlier.ru_stime
    try:
        command = [*pytest, *options, *(arguments or ["tests/rdma/guest"])]
        return run(kernel, command, out, environment=environment, seconds=7200.0 if full else 1800.0)
    finally:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall = time.monotonic() - started
        print(f"guest: {wall:.0f} s, of which {used.ru_utime + used.ru_stime - before:.0f} s on a CPU")
        results = cache_dir() / "guest-results"
        shutil.rmtree(results, ignore_errors=True)
        shutil.copytree(out, results)
        shutil.rmtree(out, ignore_errors=True)
