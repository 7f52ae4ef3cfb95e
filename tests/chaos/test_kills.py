"""A dozen kills; `make chaos` does a thousand."""

import subprocess
import sys


def test_no_acknowledged_switch_is_lost_or_done_twice() -> None:
    # A process of its own: it forks, which one with the threads of a test run should not.
    command = [sys.executable, "-m", "tests.chaos.kills", "--kills", "12", "--seed", "7"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no acknowledged switch lost, none twice, the ledger sound: met" in done.stdout
