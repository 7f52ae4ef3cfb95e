"""The guest's kernel: Debian's, unpacked into the cache, with Soft-iWARP built from Debian's own source."""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.env import cache_dir
from lab.errors import LabError

KEPT = (
    "./boot/vmlinuz*", "./lib/modules/*/modules.*", "./lib/modules/*/kernel/drivers/infiniband/*",
    "./lib/modules/*/kernel/drivers/net/*", "./lib/modules/*/kernel/drivers/virtio/*", "./lib/modules/*/kernel/net/*",
    "./lib/modules/*/kernel/fs/*", "./lib/modules/*/kernel/crypto/*", "./lib/modules/*/kernel/arch/x86/crypto/*",
    "./lib/modules/*/kernel/lib/*",
)  # fmt: skip
MODULES = (
    "virtio_pci", "9pnet_virtio", "9p", "overlay", "rdma_rxe", "ib_uverbs", "rdma_ucm", "siw", "crc32_generic",
    "crc32c_generic", "libcrc32c", "sch_netem", "veth", "tcp_diag",
)  # fmt: skip
"""rxe needs crc32_generic and siw crc32c_generic, which their dependencies do not name."""


@dataclass(frozen=True)
class Kernel:
    """A kernel image and the initial RAM disk that goes with it."""

    release: str
    image: Path
    initrd: Path


def build(say: Callable[[str], None] = print) -> Kernel:
    """Downloads, unpacks and builds what is not in the cache yet: some 30 s and 210 MB of downloads the first time.

    Raises:
        LabError: a package is not to be had, or a step failed.
    """
    if not list(cache_dir().glob("guest-*/.ready")):
        _run(["apt-get", "update", "-qq"], Path("/"))  # old lists name files that are gone
    release = _release()
    at = cache_dir() / f"guest-{release}"
    at.parent.mkdir(parents=True, exist_ok=True)
    with at.with_name(at.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (at / ".ready").exists():
            say(f"building the guest's kernel {release} in {at}")
            shutil.rmtree(at, ignore_errors=True)
            at.mkdir()
            _build(at, release)
            (at / ".ready").touch()
    kernel = Kernel(release, next(at.glob("boot/vmlinuz*")), at / "initrd.gz")
    _pack(at, kernel)
    return kernel


def _release() -> str:
    """The release of Debian's current kernel, e.g. 6.1.0-57-amd64; not the cloud flavour, which lacks RDMA."""
    if not shutil.which("apt-cache"):
        raise LabError("the guest's kernel comes from Debian's packages: apt-cache is missing")
    shown = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False)
    found = re.search(r"Depends: linux-image-(\S+)", shown.stdout)
    if found is None:
        raise LabError("apt-cache knows no linux-image-amd64: run `apt-get update`, or this is not Debian on x86-64")
    return found[1]


def _build(at: Path, release: str) -> None:
    series = ".".join(release.split(".")[:2])
    _run(["apt-get", "download", "-qq", f"linux-image-{release}", f"linux-source-{series}"], at)
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", f"linux-headers-{release}"], at)
    patterns = " ".join(f"'{pattern}'" for pattern in KEPT)
    _run(["sh", "-c", f"dpkg-deb --fsys-tarfile linux-image-*.deb | tar -x --wildcards {patterns}"], at)
    archive = "dpkg-deb --fsys-tarfile linux-source-*.deb | tar -xO --wildcards './usr/src/*.tar.xz'"
    _run(["sh", "-c", f"{archive} | tar -xJ --wildcards '*/drivers/infiniband/sw/siw/*'"], at)
    source = next(at.glob("linux-source-*/drivers/infiniband/sw/siw"))
    headers = f"/usr/src/linux-headers-{release}"
    _run(["make", "-s", "-C", headers, f"M={source}", "CONFIG_RDMA_SIW=m", "modules"], at)
    extra = at / "lib/modules" / release / "extra"
    extra.mkdir()
    _run(["strip", "-g", "-o", str(extra / "siw.ko"), str(source / "siw.ko")], at)
    _run(["depmod", "-b", str(at), release], at)
    for package in at.glob("*.deb"):
        package.unlink()
    shutil.rmtree(next(at.glob("linux-source-*")))


def _pack(at: Path, kernel: Kernel) -> None:
    """Makes the initial RAM disk: busybox, `init.sh` and the modules with what they depend on; half a second."""
    root = at / "initrd"
    shutil.rmtree(root, ignore_errors=True)
    modules = root / "lib/modules" / kernel.release
    for folder in ("bin", "proc", "sys", "dev", "host", "upper", "root"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    shutil.copy(Path(__file__).with_name("init.sh"), root / "init")
    (root / "init").chmod(0o755)
    needed = set()
    for module in MODULES:
        shown = _run(["modprobe", "-d", str(at), "-S", kernel.release, "--show-depends", module], at)
        needed |= {Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod ")}
    for path in sorted(needed):
        there = root / path.relative_to(at)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(at / "lib/modules" / kernel.release / name, modules / name)
    _run(["depmod", "-b", str(root), kernel.release], at)
    partial = kernel.initrd.with_name(f"initrd.{os.getpid()}")
    _run(["sh", "-c", f"find . | cpio --quiet -o -H newc | gzip -1 > {partial}"], root)
    partial.replace(kernel.initrd)


def _run(command: list[str], at: Path) -> str:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=at, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise LabError(f"build step failed: {' '.join(command)[:200]}\n{tail}")
    return done.stdout
