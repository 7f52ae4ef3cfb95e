"""`make rdma-test` where the guest cannot run: a reason and a good end, except in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ci", "code"), [("0", 0), ("1", 1)])
def test_skipped_with_a_reason_but_not_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "KVGUARD_CI": ci}
    done = subprocess.run(
        [sys.executable, "-m", "lab.guest", "test"], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == code
    if os.uname().machine == "x86_64":
        assert done.stdout.startswith("SKIPPED: the RDMA guest cannot run here: Debian packages missing: ")
        assert "qemu-system-x86" in done.stdout
