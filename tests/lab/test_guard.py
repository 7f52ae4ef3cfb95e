"""The guard in `auto` on real vLLM: the link gets slow and heals under steady load, against reads always and never.

Load is open: a new prompt every `GAP` seconds, whether or not the ones before are answered. Each prompt is in the store
and nowhere else, and is asked for once. The same schedule is run with the guard, with reads on and with reads off, in
blocks. Long (`KVGUARD_LAB_FULL=1`), and only true on a machine that does nothing else.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import pytest

from lab.client import Completion, prompt
from lab.pair import ratio
from lab.stack import Stack
from lab.sweep import NARROW
from tests.lab.paging import FOR, SCRAPE, paged
from tests.lab.test_explain import cell_of, drive

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.environ.get("KVGUARD_LAB_FULL") != "1", reason="long: KVGUARD_LAB_FULL=1"),
]

TOKENS, TIERS_MS = 1300, (0, 2, 5, 10, 20)
GAP = 1.0
"""Seconds. Two cores compute a prompt in 0.2 to 0.6 of it: near 1 they are what is overloaded, not the link."""

PHASES = {"low": 15.0, "high": 30.0, "healed": 40.0}
"""Seconds. A change costs the guard one or two requests, so phases are not much shorter than ten times as many."""

BLOCKS = 3
MODES = ("auto", "on", "off")
TAGGED = frozenset({"trickle"})
CLIENTS = 64
SETTLED = 5.0
"""Seconds after which the probes have seen the link as it is."""

PATIENCE = 120.0
"""Seconds until an alert must have acted: two scrapes, its window, its `for`, an evaluation."""


@dataclass
class Asked:
    """One request: when it was sent (monotonic seconds), and its answer and record later."""

    sent: float
    answer: Future[Completion]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> Completion:
        """The client's view."""
        return self.answer.result()

    @property
    def remote(self) -> bool:
        """Whether it read remotely, and not as a trickle."""
        return self.record["decision"] == "remote" and self.record["reason"] not in TAGGED

    @property
    def letter(self) -> str:
        """R: read; t: read as a trickle; a dot: computed."""
        return "R" if self.remote else "t" if self.record["decision"] == "remote" else "."


class Load:
    """Sends stored prompts at a steady rate, the same ones in the same order every time."""

    def __init__(self, stack: Stack, texts: list[str]) -> None:
        self._stack, self._left = stack, list(reversed(texts))
        self._pool = ThreadPoolExecutor(CLIENTS)

    def run(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> list[Asked]:
        """What is sent in so many seconds, or until there is `enough`."""
        sent: list[Asked] = []
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds and not enough():
            sent.append(Asked(now, self._pool.submit(self._stack.client.complete, self._left.pop(), max_tokens=2)))
            time.sleep(max(0.0, began + len(sent) * GAP - time.monotonic()))
        return sent

    def close(self) -> None:
        """Waits for every answer."""
        self._pool.shutdown()


@contextmanager
def steady(stack: Stack, mode: str, texts: list[str]) -> Iterator[Load]:
    """Load under one mode, on a good link at first; at the end the link is good again and all is answered."""
    stack.injector.rtt(0)
    stack.service.switch(mode, wait=10, stores=False)
    stack.drain()
    time.sleep(SETTLED)
    load = Load(stack, texts)
    try:
        yield load
    finally:
        stack.injector.rtt(0)
        load.close()
        stack.service.clear()


def told(stack: Stack, phases: dict[str, list[Asked]]) -> dict[str, list[Asked]]:
    """The phases with the service's records in them."""
    for each in (asked for phase in phases.values() for asked in phase):
        each.record = stack.service.request(each.done.request_id)
    return phases


def schedule(stack: Stack, mode: str, texts: list[str], far_us: float) -> dict[str, list[Asked]]:
    """Low, high and low again under one mode; times of the steps are those of the first request after each."""
    phases = {}
    with steady(stack, mode, texts) as load:
        for phase, seconds in PHASES.items():
            stack.injector.rtt(far_us if phase == "high" else 0)
            phases[phase] = load.run(seconds)
    return told(stack, phases)


@dataclass(frozen=True)
class Learnt:
    """A stack whose models know link and engine, and what was measured directly there, seconds."""

    stack: Stack
    even: float
    recompute: float
    texts: list[str]

    @property
    def far_us(self) -> float:
        """RTT to step to, microseconds."""
        return 1.7e6 * self.even


@pytest.fixture(scope="module")
def learnt(stacks) -> Learnt:
    """Learnt from a sweep of RTT. The prompts of the load are then stored one by one, with reads off: what it takes to
    store them is no part of what is to be guarded, and nothing is to be learnt from it.
    """
    stack = stacks.get(replace(NARROW, probe=True))
    direct = drive(stack, 11, TIERS_MS, tokens=TOKENS, blocks=2)
    cell_of(stack, sum(map(len, direct.remote.values())))
    stack.injector.rtt(0)
    texts = [prompt(TOKENS, 500_000 + index) for index in range(round(max(sum(PHASES.values()), PATIENCE + 30) / GAP))]
    stack.service.switch("off", wait=10)
    for text in texts:
        stack.client.complete(text, max_tokens=1)
    stack.service.clear()
    recompute = median(direct.recompute)
    even = direct.reaches(recompute)
    assert 0.0 < even < 1e-3 * TIERS_MS[-1], f"no break-even in {direct.curve[0]} s for {recompute} s"
    return Learnt(stack, even, recompute, texts)


def mean_ttft(asked: list[Asked]) -> float:
    """Mean TTFT at the client, seconds."""
    return fmean(each.done.ttft for each in asked)


@dataclass(frozen=True)
class Reaction:
    """What a run in `auto` did about a step. Times in seconds, None where nothing of the kind was."""

    evidence: float | None  # from the step until a read of after it had ended slowly, or was older than expected
    last: float | None  # from the step until the start of the last untagged read
    late: int  # untagged reads that began later than 1 s and five requests after the evidence
    again: float | None  # from healing until the start of the first untagged read


def reaction(phases: dict[str, list[Asked]]) -> Reaction:
    """Reads the decisions of a run."""
    step, usual = phases["high"][0].sent, 1.3 * mean_ttft(phases["low"])
    reads = [each for each in phases["high"] if each.remote]
    evidence = min((each.sent + min(each.done.ttft, usual) for each in reads if each.done.ttft > usual), default=None)
    after = [each for each in phases["high"] if evidence is not None and each.sent > evidence]
    healed = phases.get("healed", [])
    return Reaction(
        evidence=None if evidence is None else evidence - step,
        last=reads[-1].sent - step if reads else None,
        late=sum(each.remote and each.sent > evidence + 1.0 for each in after[5:]),
        again=next((each.sent - healed[0].sent for each in healed if each.remote), None),
    )


def shown(seconds: float | None) -> str:
    """For people."""
    return "never" if seconds is None else f"{seconds:.1f} s"


def test_a_link_that_gets_slow_is_left_and_used_again(learnt: Learnt, figure: Callable[[str], None]) -> None:
    blocks = []
    for number in range(BLOCKS):
        order = MODES[number % 3 :] + MODES[: number % 3]
        blocks.append({mode: schedule(learnt.stack, mode, learnt.texts, learnt.far_us) for mode in order})

    figure(f"break-even {learnt.even * 1e3:.1f} ms, step to {learnt.far_us / 1e3:.1f} ms, recompute "
           f"{learnt.recompute * 1e3:.0f} ms alone, {BLOCKS} blocks of {len(MODES)} runs")  # fmt: skip
    found = [reaction(block["auto"]) for block in blocks]
    for block, seen in zip(blocks, found, strict=True):
        auto = block["auto"]
        why = Counter(each.record["reason"] for phase in auto.values() for each in phase)
        figure(
            "auto: " + ", ".join(f"{phase} " + "".join(each.letter for each in asked) for phase, asked in auto.items())
            + f"; evidence {shown(seen.evidence)} after the step, last untagged read {shown(seen.last)}, late ones"
            f" {seen.late}; first untagged read {shown(seen.again)} after healing; {dict(why)}"
        )  # fmt: skip
    held = {}
    for phase in PHASES:
        means = {mode: [mean_ttft(block[mode][phase]) for block in blocks] for mode in MODES}
        better = min(("on", "off"), key=lambda mode: fmean(means[mode]))
        held[phase], low, high = ratio(means["auto"], means[better])
        figure(
            f"mean TTFT in ms, {phase}: "
            + ", ".join(f"{mode} {fmean(each) * 1e3:.0f}" for mode, each in means.items())
            + f"; auto over {better} {held[phase]:.3f} [{low:.3f}, {high:.3f}]"
        )

    assert [seen.late for seen in found] == [0] * BLOCKS
    assert all(seen.again is not None and seen.again <= 10.0 for seen in found)
    assert all(value <= 1.10 for value in held.values()), held


def test_a_black_hole_is_left_at_once_and_used_again(learnt: Learnt, figure: Callable[[str], None]) -> None:
    stack, phases = learnt.stack, {}
    with steady(stack, "auto", learnt.texts) as load:
        phases["low"] = load.run(8.0)
        stack.injector.rtt(2_000_000)
        phases["hole"] = load.run(20.0)
        stack.injector.rtt(0)
        phases["healed"] = load.run(12.0)
    told(stack, phases)
    with steady(stack, "off", learnt.texts) as load:
        recompute = load.run(20.0)

    began, healed = phases["hole"][0].sent, phases["healed"]
    after = [each.done.ttft for each in phases["hole"] if each.sent > began + 1.0]
    reference = quantiles([each.done.ttft for each in recompute], n=20, method="inclusive")[18]
    seen = quantiles(after, n=20, method="inclusive")[18]
    again = next((each.sent - healed[0].sent for each in healed if each.remote), None)
    figure(
        f"RTT 2 s: p95 TTFT after its first second {seen * 1e3:.0f} ms, recompute {reference * 1e3:.0f} ms; first "
        f"untagged read {shown(again)} after healing; "
        + ", ".join(f"{phase} " + "".join(each.letter for each in asked) for phase, asked in phases.items())
    )
    assert seen <= 1.3 * reference
    assert again is not None
    assert again <= 10.0


def test_an_alert_that_drives_the_same_switch_takes_longer(
    learnt: Learnt, figure: Callable[[str], None], tmp_path: Path, needs: Callable[..., None]
) -> None:
    needs("prometheus")
    stack, phases = learnt.stack, {}
    with steady(stack, "auto", learnt.texts) as load:
        phases["low"] = load.run(PHASES["low"])
        stack.injector.rtt(learnt.far_us)
        phases["high"] = load.run(PHASES["high"])
    guard = reaction(told(stack, phases))

    bound = 1.1 * learnt.recompute  # above it recomputing would have been faster
    with paged(stack, bound, tmp_path) as pager, steady(stack, "on", learnt.texts) as load:
        phases = {"low": load.run(PHASES["low"])}
        stack.injector.rtt(learnt.far_us)
        phases["high"] = load.run(PATIENCE, enough=lambda: pager.at is not None)
        phases["high"] += load.run(3.0)
    alert = reaction(told(stack, phases))
    slow = [each.done.ttft for each in phases["high"] if each.remote]
    figure(
        f"step to {learnt.far_us / 1e3:.1f} ms, until the last untagged read: auto {shown(guard.last)}; Prometheus"
        f" (scrape {SCRAPE}, for {FOR}, mean TTFT above {bound * 1e3:.0f} ms, told without delay) {shown(alert.last)},"
        f" {len(slow)} reads of {fmean(slow) * 1e3:.0f} ms on average"
    )
    assert pager.at is not None
    assert phases["high"][-1].letter == "."  # the switch did what it is for
    assert (guard.last or 0.0) + 10.0 < alert.last
