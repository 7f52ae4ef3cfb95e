"""`kvguard demo`: a real service on a temporary directory, fed by the built-in simulated traffic, shown live."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from guard.cli.client import Client
from guard.cli.errors import USAGE, fail
from guard.cli.show import console, fitting, seconds
from guard.cli.signals import end_as_ctrl_c
from guard.cli.status import ENGINE_COLUMNS, OPTIONAL, engine_rows
from guard.errors import ConfigError
from guard.simulate.link import Link, in_force
from guard.simulate.records import MODEL
from guard.simulate.scenario import Scenario

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
WINDOW_SECONDS: Final = 15.0
REFRESH_SECONDS: Final = 1.0
PLAIN_SECONDS: Final = 2.0
TITLE: Final = f"SIMULATED traffic, last {WINDOW_SECONDS:.0f} s (no vLLM here: the numbers are a model's, not measured)"


_CHILD: Final = """
import ctypes, os, signal, sys
parent = int(sys.argv.pop(1))
if sys.platform == "linux":  # whoever kills the demo, even with -9, ends its service too
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)
from guard.cli import main
main()
"""


def run(port: int, duration: float | None, *, engines: int | None, script: str | None, speed: float) -> None:
    """Runs the service and the traffic until Ctrl-C or for `duration` seconds, and shows a row per engine."""
    from guard.simulate import traffic

    try:
        scenario = traffic.script(script, engines)
    except ConfigError as error:
        fail(str(error), "docs/simulate.md explains the keys", code=USAGE)
    stop = threading.Event()
    end_as_ctrl_c()
    with tempfile.TemporaryDirectory(prefix="kvguard-demo-") as state, _service(port, Path(state), scenario) as url:
        source = threading.Thread(
            target=traffic.run, args=(url, scenario), kwargs={"stop_event": stop, "speed": speed},
            name="kvguard-traffic", daemon=True,
        )  # fmt: skip
        source.start()
        try:
            with Client(url) as client, contextlib.suppress(KeyboardInterrupt):
                _watch(client, duration, Story(scenario, speed))
        finally:
            stop.set()
            source.join(STOP_SECONDS)


class Story:
    """What the script does now, in words: told to the terminal beside what the service makes of it."""

    def __init__(self, scenario: Scenario, speed: float) -> None:
        self._link = Link(scenario.link, random.Random(0), pace=speed)  # noqa: S311
        self._changes = scenario.link.change
        self._speed = speed
        self._began = time.monotonic()

    def line(self) -> str:
        """One line: time in the script, idle RTT, what is going on."""
        now = time.monotonic() - self._began
        at = now * self._speed
        condition = self._link.condition(now, 0)
        said = next((each.say for each in reversed(self._changes) if each.say and in_force(each, at)), "")
        lost = f", {condition.loss:.0%} lost" if condition.loss else ""
        return f"script at {at:.0f} s: idle RTT {seconds(condition.rtt)}{lost}; {said or 'the link is as it began'}"


def _watch(client: Client, duration: float | None, story: Story) -> None:
    end = float("inf") if duration is None else time.monotonic() + duration
    out = console()
    out.print(_where(client.endpoint))
    if not sys.stdout.isatty():
        while _nap(PLAIN_SECONDS, end):
            out.print(f"simulated {story.line()}", markup=False)
            for line in _lines(client):
                out.print(line, markup=False)
        return
    with Live(console=out, auto_refresh=False, transient=False) as live:
        while _nap(REFRESH_SECONDS, end):
            offload, measured = _ask(client)
            rows = engine_rows(offload, measured)
            shown = fitting(out, ENGINE_COLUMNS, rows, ("why", *OPTIONAL))
            title = Text(TITLE, style="bold yellow")
            live.update(Group(title, Text(story.line(), style="cyan"), shown), refresh=True)


def _nap(seconds: float, end: float) -> bool:
    left = end - time.monotonic()
    if left <= 0:
        return False
    time.sleep(min(seconds, left))
    return True


def _ask(client: Client) -> tuple[Any, Any]:
    return client.get("/v1/offload"), client.get("/v1/correlation", {"since_seconds": WINDOW_SECONDS})


def _lines(client: Client) -> Iterator[str]:
    for row in engine_rows(*_ask(client)):
        cells = (f"{name.removesuffix('>')}={value}" for name, value in zip(ENGINE_COLUMNS, row, strict=True) if value)
        yield "simulated " + " ".join(cells)


def _where(url: str) -> str:
    return (
        f"kvguard demo at {url}\n"
        f"  {url}/              the console, for a browser\n"
        f"  {url}/openapi.json  the API\n"
        f"  {url}/metrics       for Prometheus\n"
        f"look and switch offload live, from another terminal:\n"
        f"  kvguard status --endpoint {url}\n"
        f"  kvguard offload off --endpoint {url} --reason 'trying it'\n"
        f"  kvguard offload clear --endpoint {url}\n"
        f"Ctrl-C stops everything.\n"
    )


@contextlib.contextmanager
def _service(port: int, state: Path, scenario: Scenario) -> Iterator[str]:
    """`kvguard serve` as a process of its own, so that traffic and service do not share an interpreter."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
    goal = scenario.objective
    objective = {"model": MODEL, "ttft_seconds": goal.ttft, "percentile": goal.percentile, "tpot_seconds": goal.tpot}
    env["KVGUARD_SERVE_OBJECTIVES"] = json.dumps([objective])
    command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--state-dir", str(state)], stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        yield _url(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    found: list[str] = []
    last: deque[str] = deque(maxlen=5)
    told = threading.Event()
    assert process.stderr is not None  # noqa: S101  it is a pipe
    threading.Thread(target=_read, args=(process.stderr, found, last, told), daemon=True).start()
    told.wait(START_SECONDS)
    if not found:
        fail("the service did not start: " + (" ".join(last) or "it said nothing"))
    return found[0]


def _read(stderr: IO[str], found: list[str], last: deque[str], told: threading.Event) -> None:
    """Reads the service's log to its end, so that the pipe never fills."""
    for line in stderr:
        last.append(line.strip())
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if entry["event"] == "listening":
                found.append(entry["url"])
                told.set()
    told.set()
