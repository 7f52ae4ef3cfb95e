import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from guard.cli.demo import Story
from guard.simulate import traffic


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-m", "guard.cli", "demo", "--engines", "1", "--speed", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_demo_killed_with_9_takes_its_service_along(demo: subprocess.Popen[str]):
    assert demo.stdout is not None
    assert "kvguard demo at" in demo.stdout.readline()
    (service,) = children(demo.pid)
    demo.kill()
    demo.wait()
    end = time.monotonic() + 20.0
    while Path(f"/proc/{service}/cmdline").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{service}/cmdline").exists() or _zombie(service)


def _zombie(pid: int) -> bool:
    """Ended, but nobody reaps orphans here."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_demo_shows_its_script_beside_the_engines(demo: subprocess.Popen[str]):
    assert demo.stdout is not None
    told = ""
    for line in demo.stdout:
        told += line
        if "degrades" in told and "engine=sim-0:8000/0" in told:
            break
    assert "simulated script at" in told


def test_a_script_that_is_not_there_is_an_error():
    command = [sys.executable, "-m", "guard.cli", "demo", "--script", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
    assert done.returncode == 2
    assert "no such file or scenario; there are " in done.stderr


def test_the_story_says_what_the_script_does(monkeypatch: pytest.MonkeyPatch):
    scenario = traffic.script(None, engines=3)
    assert scenario.engine.count == 3
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    story = Story(scenario, speed=2.0)
    assert story.line() == "script at 0 s: idle RTT 200 us; the link is as it began"
    now[0] += 35.0
    assert story.line().startswith("script at 70 s: idle RTT 30.0 ms; the link degrades")
    now[0] += 15.0
    assert story.line() == "script at 100 s: idle RTT 200 us; the link is as it began"
