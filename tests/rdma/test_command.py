"""`kvguard probe serve --rdma`: the target as an operator runs it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KVGUARD = [sys.executable, "-m", "guard.cli", "probe", "serve"]


def environment(path: Path | str, **more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": f"{path}:{root}", **more}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_it_is_told_to_stop(pyverbs: Callable[[str], Path], number: signal.Signals) -> None:
    words = ["--rdma", "fake0", "--bind", "127.0.0.1", "--port", "0", "--interpreter", sys.executable]
    process = subprocess.Popen([*KVGUARD, *words], env=environment(pyverbs("44")), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("listening on 127.0.0.1:")
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
        assert not Path(f"/proc/{child}").exists()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("device", "changed", "code"),
    [
        ("other", {}, "no-device: this host has no RDMA device other; it has fake0"),
        ("fake0", {"FAKE_DEVICES": "error"}, "no-device: this host has no RDMA device"),
        ("fake0", {"FAKE_GIDS": ""}, "no-gid: the port has no RoCEv2 GID"),
    ],
)
def test_what_is_missing_is_said(
    pyverbs: Callable[[str], Path], device: str, changed: dict[str, str], code: str
) -> None:
    words = ["--rdma", device, "--bind", "127.0.0.1", "--port", "0", "--interpreter", sys.executable]
    done = subprocess.run(
        [*KVGUARD, *words],
        env=environment(pyverbs("44"), **changed),
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvguard: {code}")
    assert done.stderr.count("\n") == 2  # what, and what to do about it; no traceback


def test_no_device_named() -> None:
    done = subprocess.run(KVGUARD, env=environment(""), capture_output=True, check=False, text=True, timeout=120)
    assert done.returncode == 2
    assert "--rdma" in done.stderr
