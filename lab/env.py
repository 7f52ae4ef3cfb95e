"""Builds what the lab runs on: two virtual environments, the tiny model and the injector, cached outside the tree.

The cache is `$KVGUARD_LAB_CACHE` (default `~/.cache/kvguard-lab`). Each part lies under a hash of all that it was made
from, so a changed requirement file makes a new part and never mends an old one. A part counts only once its `.ready`
file exists: a build that was cut short is thrown away. (Virtual environments hold their own path in every script, so
they are built in place under a lock instead of being renamed.)
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError
from lab.tools import need

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCH = "torch==2.13.0"
"""Pinned by version, not by hash: the registry's file under this name is the CUDA build with gigabytes of libraries. A
machine without a GPU should offer its CPU build through pip's configuration (find-links or an index of CPU wheels)."""


@dataclass(frozen=True)
class LabEnv:
    """Paths of the finished parts."""

    vllm: Path  # venv with vLLM and LMCache
    rotel: Path  # venv with the OTLP collector
    model: Path
    injector: Path  # compiled lab/injector/tundelay.c

    @property
    def python(self) -> Path:
        """Python of the vLLM environment."""
        return self.vllm / "bin/python"


def cache_dir() -> Path:
    """Where finished parts are kept."""
    return Path(os.environ.get("KVGUARD_LAB_CACHE") or Path.home() / ".cache/kvguard-lab")


def build(say: Callable[[str], None] = print) -> LabEnv:
    """Builds every part that is missing (the first time some minutes and 4 GB) and installs this tree's kvguard.

    Raises:
        LabError: a tool is missing or a step failed; the text ends with that step's last output.
    """
    need("gcc", "redis-server", "ip", "unshare")
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    vllm_files = [HERE / "requirements-vllm.txt", HERE / "requirements-engines.txt"]
    vllm = _part("vllm", [version, TORCH, *vllm_files], _build_vllm, say)
    rotel = _part("rotel", [version, ROOT / "requirements/bench.txt"], _build_rotel, say)
    model = _part(
        "model", [HERE / "model.py", str(vllm)], lambda at: _run(vllm / "bin/python", HERE / "model.py", at), say
    )
    injector = _part("injector", [HERE / "injector/tundelay.c"], _build_injector, say)
    env = LabEnv(vllm=vllm, rotel=rotel, model=model, injector=injector / "tundelay")
    _install_shim(env)
    install_kvguard(env, say)
    return env


def install_kvguard(env: LabEnv, say: Callable[[str], None] = print) -> None:
    """Installs the wheel built from this tree into the vLLM environment, unless these very sources are in it."""
    sources = [ROOT / "pyproject.toml", *sorted((ROOT / "guard").rglob("*.py"))]
    digest = _digest([str(path.relative_to(ROOT)) for path in sources] + sources)
    marker = env.vllm / ".kvguard"
    with _locked(env.vllm):
        if marker.exists() and marker.read_text() == digest:
            return
        say("installing kvguard's wheel into the vLLM environment")
        dist = env.vllm / "wheel"
        shutil.rmtree(dist, ignore_errors=True)
        _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, ROOT)
        wheel = next(dist.glob("*.whl"))
        _pip(env.vllm, "--no-deps", "--no-index", "--force-reinstall", wheel)
        marker.write_text(digest)


def _build_vllm(at: Path) -> None:
    _run(sys.executable, "-m", "venv", at)
    _pip(at, TORCH)
    _pip(at, "--require-hashes", "--no-deps", "-r", HERE / "requirements-vllm.txt")
    _pip(at, "--require-hashes", "--no-deps", "-r", HERE / "requirements-engines.txt")


def _build_rotel(at: Path) -> None:
    _run(sys.executable, "-m", "venv", at)
    _pip(at, "--require-hashes", "-r", ROOT / "requirements/bench.txt")


def _build_injector(at: Path) -> None:
    at.mkdir()
    source = HERE / "injector/tundelay.c"
    _run("gcc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", at / "tundelay", source)


def _install_shim(env: LabEnv) -> None:
    """Copies the lab's plugins for vLLM into the environment, as if installed (see lab/shim)."""
    site = env.vllm / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for module in (HERE / "shim").glob("*.py"):
        shutil.copyfile(module, site / module.name)
    shutil.copytree(HERE / "shim/dist-info", site / "kvguard_lab_shim-0.dist-info", dirs_exist_ok=True)


def _part(name: str, made_from: list[str | Path], build_at: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Path of a finished part; builds it when it is not there."""
    path = cache_dir() / f"{name}-{_digest(made_from)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if not (path / ".ready").exists():
            say(f"building {name} in {path}")
            shutil.rmtree(path, ignore_errors=True)
            build_at(path)
            (path / ".ready").touch()
    return path


def _digest(items: list[str | Path]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(item.read_bytes() if isinstance(item, Path) else item.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock next to `path`, so that two runs do not build one part at the same time."""
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def alone(say: Callable[[str], None] = print) -> Iterator[None]:
    """Waits until no other lab runs on this machine: they would slow each other and share one vLLM environment."""
    path = cache_dir() / "machine.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("lab: waiting for another lab on this machine to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip(venv: Path, *arguments: str | Path) -> None:
    _run(venv / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments)


def _run(*command: str | Path) -> None:
    """Runs one build step to its end; the environment of the caller's own Python does not leak into it."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], env=clean, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise LabError(f"build step failed: {' '.join(map(str, command))}\n{tail}")
