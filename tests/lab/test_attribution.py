"""Attribution by intervention: what is slowed on purpose grows its own part of TTFT, and no other.

Each test makes one thing slower by X and compares pairs of requests, with and without, whose order alternates. X never
comes from the hook: it is the time in which the command proxy held the commands back, or the time in which other
requests held the running slots on the client's clock.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import pytest

from guard import semconv
from lab.client import Completion, prompt
from lab.config import StackConfig
from lab.processes import wait_until
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
CHUNKS = 4
"""Whole chunks of the prompt, all of them in the store. Few, so that what is not slowed is short and steady."""

PAIRS, BATCHES = 8, 3
"""Pairs measured at once, and how often more are added while the medians over all of them miss: a busy moment of the
machine must not decide, a wrong part stays wrong."""

SLOTS = 2
EXTRA_MS = 800.0
"""What an intervention is made to add, about; what it did add is measured."""

NAMED, OTHERS = 0.10, 0.05
"""Tolerances as shares of X: of the part that must grow, and of each that must not."""

PARTS = tuple(name.rpartition(".")[2] for name in semconv.TIME_PARTS)


@pytest.fixture
def narrow(stacks, forward: dict[str, str]) -> Stack:
    """LMCacheMPConnector on a vLLM that runs two requests at a time."""
    return stacks.get(StackConfig(otlp="service", command_proxy=True, max_num_seqs=SLOTS, service_env=forward))


@dataclass
class Pair:
    """The same request without and with the intervention, which added so many seconds."""

    plain: Completion
    slowed: Completion
    added: float


def text_in_store(stack: Stack, seed: int) -> str:
    """A prompt whose whole chunks are in the store."""
    text = prompt(CHUNKS * CHUNK + 40, seed)
    stack.client.complete(text, max_tokens=1)
    stack.settle_stores()  # the first store of a fresh engine is slow
    return text


def rest(stack: Stack) -> None:
    """Leaves the prompt in the store only. Hits of whole chunks store nothing, so there is nothing to wait for."""
    stack.client.reset_prefix_cache()
    if stack.lmcache is not None:
        stack.clear_l1()


def run_pairs(stack: Stack, one: Callable[[bool], tuple[Completion, float]]) -> list[Pair]:
    """Runs the request with and without the intervention in turn; the first pair only warms up."""
    pairs = []
    for number in range(PAIRS + 1):
        results = {}
        for slowed in (False, True) if number % 2 else (True, False):
            rest(stack)
            results[slowed] = one(slowed)
        pairs.append(Pair(results[False][0], results[True][0], results[True][1]))
    for pair in pairs:
        assert pair.plain.cached == pair.slowed.cached == CHUNKS * CHUNK
    return pairs[1:]


def judge(
    stack: Stack, one: Callable[[bool], tuple[Completion, float]], named: str, figure: Callable[[str], None]
) -> None:
    """The named part grew by what was added, +- 10 %; each other by less than 5 % of it. Medians over all pairs."""

    def parts(done: Completion) -> dict[str, float]:
        return {step["part"]: step["seconds"] for step in stack.service.request(done.request_id)["timeline"]}

    both: list[tuple[dict[str, float], dict[str, float], float]] = []
    for _ in range(BATCHES):
        both += [(parts(pair.plain), parts(pair.slowed), pair.added) for pair in run_pairs(stack, one)]
        grown = {part: median(slowed[part] - plain[part] for plain, slowed, _ in both) for part in PARTS}
        share = median((slowed[named] - plain[named]) / added for plain, slowed, added in both)
        added = median(each for *_, each in both)
        wrong = {part: x / added for part, x in grown.items() if part != named and abs(x / added) >= OTHERS}
        shown = ", ".join(f"{part} {seconds * 1e3:+.1f}" for part, seconds in grown.items())
        figure(
            f"X {added * 1e3:.1f} ms, {named} grew by {share:.3f} X; ms grown: {shown} (medians of {len(both)} pairs)"
        )
        if not wrong and abs(share - 1.0) <= NAMED:
            break

    assert share == pytest.approx(1.0, abs=NAMED)
    assert wrong == {}


@contextmanager
def full_slots(stack: Stack, tokens: int) -> Iterator[Future[float]]:
    """One prompt with a choice per slot holds them all for so many tokens; a future of the moment when it ended."""

    def block() -> float:
        stack.client.complete(prompt(20, 7900), max_tokens=tokens, n=SLOTS, temperature=1.0)
        return time.perf_counter()

    def running() -> int:
        lines = stack.client.get("/metrics").splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{"))

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(block)
        wait_until(lambda: running() == SLOTS, 10.0, "the slots to be full")
        yield end


def test_full_slots_grow_the_queue(narrow: Stack, figure: Callable[[str], None]) -> None:
    text = text_in_store(narrow, seed=7500)
    warm = [narrow.client.complete(prompt(20, 7900), max_tokens=40, n=SLOTS, temperature=1.0) for _ in range(3)]
    per_token = median((done.e2e - done.ttft) / 39 for done in warm)
    tokens = min(2000, round(1.3 * EXTRA_MS / 1e3 / per_token))  # some pass before the slots are seen to be full

    def one(slowed: bool) -> tuple[Completion, float]:
        if not slowed:
            return narrow.client.complete(text, max_tokens=2), 0.0
        with full_slots(narrow, tokens) as end:
            sent = time.perf_counter()
            done = narrow.client.complete(text, max_tokens=2)
            return done, end.result() - sent

    judge(narrow, one, "queue", figure)


@pytest.mark.parametrize(
    ("setup", "command", "count", "named"),
    [
        ("narrow", "EXISTS", CHUNKS, "lookup"),
        ("narrow", "GET", CHUNKS, "lookup"),  # LMCacheMP reads the store while it looks up
        ("inprocess", "EXISTS", CHUNKS, "lookup"),
        ("inprocess", "GET", 2 * CHUNKS, "fetch"),
    ],
)
def test_a_slow_command_grows_the_part_that_it_belongs_to(
    request: pytest.FixtureRequest, figure: Callable[[str], None], setup: str, command: str, count: int, named: str
) -> None:
    stack: Stack = request.getfixturevalue(setup)
    text = text_in_store(stack, seed=7000 + count)
    delay_us = EXTRA_MS * 1e3 / CHUNKS  # serial where the connector asks chunk by chunk

    def one(slowed: bool) -> tuple[Completion, float]:
        stack.commands.delay(command, delay_us if slowed else 0)
        stack.commands.reset()
        done = stack.client.complete(text, max_tokens=2)
        seen = stack.commands.stats()
        stack.commands.delay(command, 0)
        assert seen[f"command.{command}"] == count
        held = seen.get(f"held.{command}", 0)
        if slowed:  # between what one connection waited for and all commands in a row
            busiest = max(n for key, n in seen.items() if key.startswith("command.c") and key.endswith(f".{command}"))
            assert busiest * delay_us <= held <= count * delay_us * 1.2
        return done, held / 1e6

    judge(stack, one, named, figure)
