"""`kvguard sweep` against real vLLM, as an operator starts it."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.processes import wait_until
from lab.stack import Stack
from lab.sweep import NARROW, command

pytestmark = pytest.mark.lab

TRIPS = 2 * (1300 // 128)
"""Round trips in a row of one hit: LMCache's server asks for each chunk and then gets each, over one connection."""


@pytest.fixture
def narrow(stacks) -> Stack:
    return stacks.get(NARROW)


def at_rest(stack: Stack) -> bool:
    """Whether nobody's delay or switch is left."""
    return stack.injector.stats()["rtt_us"] == 0 and not stack.service.get("/v1/offload")["overrides"]


def test_the_table_says_where_offload_loses(narrow: Stack, tmp_path: Path, figure: Callable[[str], None]) -> None:
    tiers = ("--rtts", "0,5ms,40ms", "--concurrency", "1,4", "--requests", "6", "--no-local", "--json")
    done = subprocess.run(command(narrow, tmp_path, *tiers), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    for curve in json.loads(done.stdout)["curves"]:
        figure(curve["words"])
        figure(f"round trips in a row {curve['round_trips']}, counted {curve['reported_round_trips']}")
        assert all(tier["strays"] == 0 for tier in curve["tiers"])
        near, _, far = (tier["remote"]["value"] for tier in curve["tiers"])
        assert near < curve["recompute"]["value"] < far
        assert 0.0 < curve["break_even"]["value"] < 0.04
        assert curve["reported_round_trips"] == TRIPS
        # Each is a round trip at least; a chunk is more than an idle connection's window lets through at once, and
        # with several clients one connection serves them in turn.
        assert curve["round_trips"]["high"] >= TRIPS
    assert at_rest(narrow)
    assert (tmp_path / "report.html").read_text().count("<svg") == 2


def test_interrupted_it_puts_back_what_it_changed(narrow: Stack, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(narrow, tmp_path, "--rtts", "10ms,20ms", "--concurrency", "1", "--requests", "6", "--repeats", "9"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    cells = tmp_path / "cells.jsonl"
    wait_until(lambda: cells.exists() and not at_rest(narrow), 180.0, "the sweep to measure")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "interrupted; the road and the switch are put back" in said
    assert at_rest(narrow)
    assert cells.read_text().endswith("\n")
