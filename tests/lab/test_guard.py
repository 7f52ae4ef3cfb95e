"""The guard in `auto` on real vLLM: the link gets slow and heals under steady load, against reads always and never.

Load is open: a new prompt every `GAP` seconds, whether or not the ones before are answered. Each prompt is in the store
and nowhere else, and is asked for once. The same schedule is run with the guard, with reads on and with reads off. Long
(`KVGUARD_LAB_FULL=1`), and only true on a machine that does nothing else.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import fmean, quantiles
from typing import Any

import pytest

from lab.client import Completion, prompt
from lab.stack import Stack
from lab.sweep import NARROW
from tests.lab.test_explain import TOKENS, cell_of, drive

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.environ.get("KVGUARD_LAB_FULL") != "1", reason="long: KVGUARD_LAB_FULL=1"),
]

GAP = 0.7
LOW_SECONDS, HIGH_SECONDS, HEAL_SECONDS = 10.0, 16.0, 20.0
TAGGED = frozenset({"trickle"})
CLIENTS = 64


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


class Load:
    """Sends stored prompts at a steady rate."""

    def __init__(self, stack: Stack, texts: list[str]) -> None:
        self._stack, self._left = stack, list(reversed(texts))
        self._pool = ThreadPoolExecutor(CLIENTS)

    def run(self, seconds: float) -> list[Asked]:
        """What is sent in so many seconds."""
        sent: list[Asked] = []
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            sent.append(Asked(now, self._pool.submit(self._stack.client.complete, self._left.pop(), max_tokens=2)))
            time.sleep(max(0.0, began + len(sent) * GAP - time.monotonic()))
        return sent

    def close(self) -> None:
        """Waits for every answer."""
        self._pool.shutdown()


def told(stack: Stack, phases: dict[str, list[Asked]]) -> dict[str, list[Asked]]:
    """The phases with the service's records in them."""
    for each in (asked for phase in phases.values() for asked in phase):
        each.record = stack.service.request(each.done.request_id)
    return phases


def schedule(stack: Stack, mode: str, texts: list[str], far_us: float) -> dict[str, list[Asked]]:
    """Low, high and low again under one mode; times of the steps are those of the first request after each."""
    stack.injector.rtt(0)
    stack.service.switch(mode, wait=10, stores=False)
    stack.drain()
    time.sleep(5.0)  # probes see the link as it is now
    load, phases = Load(stack, texts), {}
    try:
        phases["low"] = load.run(LOW_SECONDS)
        stack.injector.rtt(far_us)
        phases["high"] = load.run(HIGH_SECONDS)
        stack.injector.rtt(0)
        phases["healed"] = load.run(HEAL_SECONDS)
    finally:
        stack.injector.rtt(0)
        load.close()
        stack.service.clear()
    return told(stack, phases)


def store(stack: Stack, number: int, seed: int) -> list[str]:
    """Prompts that the store holds."""
    stack.injector.rtt(0)
    texts = [prompt(TOKENS, seed + index) for index in range(number)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: stack.client.complete(text, max_tokens=1), texts))
    stack.drain()
    return texts


@pytest.fixture(scope="module")
def learnt(stacks) -> tuple[Stack, float]:
    """A stack whose models know link and engine, and the break-even RTT measured directly, seconds."""
    stack = stacks.get(replace(NARROW, probe=True))
    direct = drive(stack, 11)
    cell_of(stack, sum(map(len, direct.remote.values())))
    return stack, direct.reaches(sorted(direct.recompute)[len(direct.recompute) // 2])


def mean_ttft(asked: list[Asked]) -> float:
    """Mean TTFT at the client, seconds."""
    return fmean(each.done.ttft for each in asked)


def test_a_link_that_gets_slow_is_left_and_used_again(
    learnt: tuple[Stack, float], figure: Callable[[str], None]
) -> None:
    stack, even = learnt
    needed = round((LOW_SECONDS + HIGH_SECONDS + HEAL_SECONDS) / GAP) + 6
    texts = store(stack, needed, 500_000)
    runs = {mode: schedule(stack, mode, texts, 1.7e6 * even) for mode in ("auto", "on", "off")}

    auto = runs["auto"]
    step, heal = auto["high"][0].sent, auto["healed"][0].sent
    slow = [a for a in (*auto["low"], *auto["high"]) if a.remote and a.sent + a.done.ttft > step]
    evidence = min((a.sent + a.done.ttft for a in slow), default=step)
    late = [
        number for number, a in enumerate(x for x in auto["high"] if x.sent > evidence)
        if a.remote and a.sent > evidence + 1.0 and number >= 5
    ]  # fmt: skip
    again = next((a.sent - heal for a in auto["healed"] if a.remote), None)
    means = {mode: {phase: mean_ttft(asked) for phase, asked in run.items()} for mode, run in runs.items()}
    figure(f"break-even {even * 1e3:.1f} ms, step to {1.7 * even * 1e3:.1f} ms; mean TTFT in ms " + "; ".join(
        f"{mode} " + ", ".join(f"{phase} {value * 1e3:.0f}" for phase, value in found.items())
        for mode, found in means.items()))  # fmt: skip
    figure(
        f"auto: {sum(a.remote for a in auto['high'])} of {len(auto['high'])} read on the slow link, evidence after"
        f" {evidence - step:.2f} s, untagged reads later than 1 s and 5 requests after it: {len(late)};"
        f" remote again {again if again is None else round(again, 1)} s after healing"
    )
    figure("auto's reasons: " + ", ".join(
        f"{phase} {dict(Counter(a.record['decision'] + '/' + a.record['reason'] for a in asked))}"
        for phase, asked in auto.items()))  # fmt: skip
    figure("auto's decisions: " + ", ".join(
        f"{phase} " + "".join("R" if a.remote else "t" if a.record["decision"] == "remote" else "." for a in asked)
        for phase, asked in auto.items()))  # fmt: skip

    assert late == []
    assert again is not None
    assert again <= 10.0
    for phase in ("low", "high", "healed"):
        better = min(means["on"][phase], means["off"][phase])
        assert means["auto"][phase] <= 1.25 * better, phase


def test_a_black_hole_is_left_at_once(learnt: tuple[Stack, float], figure: Callable[[str], None]) -> None:
    stack, _ = learnt
    texts = store(stack, round(30 / GAP), 600_000)
    stack.service.switch("auto", wait=10, stores=False)
    stack.drain()
    time.sleep(5.0)
    load, phases = Load(stack, texts), {}
    try:
        phases["low"] = load.run(6.0)
        stack.injector.rtt(2_000_000)
        phases["hole"] = load.run(12.0)
    finally:
        stack.injector.rtt(0)
        load.close()
        stack.service.clear()
    told(stack, phases)
    stack.service.switch("off", wait=10, stores=False)
    stack.drain()
    load = Load(stack, texts)
    recompute = load.run(8.0)
    load.close()
    stack.service.clear()

    began = phases["hole"][0].sent
    after = [each.done.ttft for each in phases["hole"] if each.sent > began + 1.0]
    reference = quantiles([each.done.ttft for each in recompute], n=20, method="inclusive")[18]
    seen = quantiles(after, n=20, method="inclusive")[18]
    figure(f"RTT 2 s: p95 TTFT after its first second {seen * 1e3:.0f} ms, recompute {reference * 1e3:.0f} ms; reads "
           + "".join("R" if each.remote else "." for each in phases["hole"]))  # fmt: skip
    assert seen <= 1.3 * reference
