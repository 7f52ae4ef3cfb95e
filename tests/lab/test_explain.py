"""What kvguard makes of live traffic while the link changes, against the same curves measured directly.

Long (`KVGUARD_LAB_FULL=1`), and only true on a machine that does nothing else.
"""

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import pytest

from guard.sweep.analysis import crossing
from lab.client import prompt
from lab.config import StackConfig
from lab.processes import wait_until
from lab.stack import Stack
from lab.sweep import NARROW

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.environ.get("KVGUARD_LAB_FULL") != "1", reason="long: KVGUARD_LAB_FULL=1"),
]

TOKENS = 1300
BLOCKS = 8
HITS, MISSES = 4, 2
SEEN_SECONDS = 4.5
"""Idle RTT is the least of the last three rounds, one a second."""

SETUPS = {
    "lmcache-mp": replace(NARROW, probe=True, one_core=True),
    "in-process": StackConfig(connector="lmcache", chunk_size=256, probe=True, one_core=True),
}

NEAR_MS = (0, 1, 2, 5, 10, 20)
FAR_MS = (0, 1, 5, 10, 20, 40, 80)
"""In-process LMCache makes a quarter of the round trips, so it breaks even further out."""


OFF = -1
"""In the place of a tier: reads off."""


@dataclass
class Direct:
    """TTFT of the same requests by what was set and which road they took, seconds; and the idle RTT that probes saw."""

    remote: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    recompute: list[float] = field(default_factory=list)
    rtt: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def tiers(self) -> list[int]:
        """What was set, ms."""
        return sorted(self.rtt)

    @property
    def rtts(self) -> np.ndarray:
        """RTT per tier."""
        return np.array([median(self.rtt[tier]) for tier in self.tiers])

    @property
    def curve(self) -> np.ndarray:
        """Median TTFT of hits per tier."""
        return np.array([[median(self.remote[tier]) for tier in self.tiers]])

    def reaches(self, level: float) -> float:
        """RTT at which the curve gets there; infinite when it does not."""
        return float(crossing(self.rtts, self.curve, np.array([level]))[0])

    @property
    def slope(self) -> float:
        """Round trips in a row: median slope over all pairs of tiers."""
        i, j = np.triu_indices(len(self.tiers), 1)
        return float(np.median((self.curve[0, j] - self.curve[0, i]) / (self.rtts[j] - self.rtts[i])))


def drive(
    stack: Stack, seed: int, tiers: Sequence[int] = NEAR_MS, *, tokens: int = TOKENS, blocks: int = BLOCKS
) -> Direct:
    """Hits and misses at every tier and the same prompts with reads off, in blocks of random order."""
    rng, direct, fresh = random.Random(seed), Direct(), seed * 100_000
    known = [prompt(tokens, fresh + 50_000 + number) for number in range(HITS)]
    for text in known:
        stack.client.complete(text, max_tokens=1)
    stack.drain()

    def ttft(text: str) -> float:
        done = stack.client.complete(text, max_tokens=2)
        stack.settle_stores()
        return stack.service.request(done.request_id)["ttft_seconds"]

    def at(tier: int) -> None:
        stack.injector.rtt(tier * 1000)
        time.sleep(SEEN_SECONDS)
        (target,) = stack.service.get("/v1/probes")["probes"]
        direct.rtt[tier].append(target["idle_seconds"])
        for text in known:
            stack.drain()
            direct.remote[tier].append(ttft(text))
        for _ in range(MISSES):
            nonlocal fresh
            fresh += 1
            ttft(prompt(tokens, fresh))

    def without() -> None:
        stack.service.switch("off", wait=10, stores=False)
        for text in known:
            stack.drain()
            direct.recompute.append(ttft(text))
        stack.service.switch("on", wait=10)

    for _ in range(blocks):
        for tier in rng.sample((*tiers, OFF), len(tiers) + 1):
            without() if tier == OFF else at(tier)
    stack.service.clear()
    return direct


def cell_of(stack: Stack, requests: int) -> dict[str, Any]:
    """The class's cell, once it holds all requests."""

    def found() -> dict[str, Any] | None:
        cells = stack.service.get("/v1/inflection")["cells"]
        return next((cell for cell in cells if cell["class"] != "all" and cell["n"] >= requests), None)

    wait_until(lambda: found() is not None, 30.0, "the estimator to have seen everything")
    return found()


@pytest.mark.parametrize(
    ("setup", "seed", "tiers"), [("lmcache-mp", 1, NEAR_MS), ("in-process", 2, FAR_MS)], ids=list(SETUPS)
)
def test_inflection_from_live_traffic_is_that_of_the_curves(
    stacks, figure: Callable[[str], None], setup: str, seed: int, tiers: Sequence[int]
) -> None:
    stack: Stack = stacks.get(SETUPS[setup])

    direct = drive(stack, seed, tiers)

    hits = sum(map(len, direct.remote.values()))
    cell = cell_of(stack, hits)
    recompute = median(direct.recompute)
    even, depart = direct.reaches(recompute), direct.reaches(1.1 * float(direct.curve[0, 0]))
    shown = {name: (cell[name]["value"], cell[name]["low"], cell[name]["high"], cell[name]["source"]) for name in (
        "break_even", "departure", "serial_round_trips")}  # fmt: skip
    figure(
        "TTFT of hits by tier "
        + ", ".join(
            f"{rtt * 1e3:.2f} ms: {ttft * 1e3:.0f}" for rtt, ttft in zip(direct.rtts, direct.curve[0], strict=True)
        )
        + f"; recompute {recompute * 1e3:.0f} ms; directly: departs {depart * 1e3:.2f} ms, even {even * 1e3:.2f} ms,"
        f" slope {direct.slope:.1f}; kvguard (value, low, high, source): {shown}; verdict {cell['verdict']}"
    )

    assert cell["break_even"]["value"] == pytest.approx(even, rel=0.2)
    assert cell["serial_round_trips"]["value"] == pytest.approx(direct.slope, rel=0.15)
    assert cell["departure"]["value"] == pytest.approx(depart, rel=0.3)
    assert {cell[name]["source"] for name in ("break_even", "departure")} <= {"measured", "projected"}
    assert cell["verdict"]["cause"] == "rtt"
