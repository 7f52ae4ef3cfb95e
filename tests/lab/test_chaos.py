"""What breaks around the hook breaks neither vLLM nor its answers: the same requests end as they do without a hook.

Two engines run side by side, one with the hook (and the smallest ring there is), one without. A fault of kvguard's
service concerns the first alone; a fault of Redis or of a worker is done to both. Blocks of the same requests go to the
two in turn; all are asked one at a time, so that answers are equal to the last digit.

In mode `auto` the same is done while the controller acts: reads of both stores get slow and healthy in turn, so that it
refuses some. What it refuses ends as recomputing does, what it admits as without the hook. The long form
(`KVGUARD_LAB_FULL=1`) does all of it in both modes.
"""

import contextlib
import http.client
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from guard import semconv
from lab.client import Completion, prompt
from lab.config import StackConfig
from lab.env import LabEnv
from lab.errors import LabError
from lab.pair import Pair, interval, pair
from lab.processes import wait_until
from lab.stack import Stack
from tests.lab.service_faults import FAULTS, killed, polled

pytestmark = pytest.mark.lab
CHUNK = 256
RING = 64
LONG = os.environ.get("KVGUARD_LAB_FULL") == "1"
BLOCKS = 12 if LONG else 6
MODES = ("on", "auto") if LONG else ("on",)
LEARNT = 34
"""Reads after which the models are believed, and some to spare."""

SLOW_GET_US = 150_000
"""Added to each GET of a slow store: a hit of two or four chunks then takes far longer than computing it."""

SLOWER = 0.05
"""Seconds of TTFT that a fault of the service may cost at most, by the low end of the interval: a request that waited
for the service even once in a block would show as much."""

HITS = {seed: prompt(tokens, seed) for seed, tokens in ((8001, 600), (8002, 1100))}


@dataclass(frozen=True)
class Outcome:
    """How a request ended: its tokens and how many were not computed, or its error without what differs by nature."""

    error: str
    tokens: tuple[int, ...]
    cached: int


@dataclass(frozen=True)
class Prepared(Pair):
    """Both engines; how each prompt of `HITS` ends when it is computed, by its seed."""

    computed: dict[int, Outcome]


def asked(stack: Stack, text: str, **options: object) -> tuple[Outcome, Completion | None]:
    """Sends a prompt and keeps how it ends, whichever way that is."""
    try:
        done = stack.client.complete(text, **options)
    except LabError as error:
        return Outcome(f"answered: {str(error).split('vLLM ')[-1][:60]}", (), 0), None
    except (OSError, http.client.HTTPException) as error:
        return Outcome(f"broken: {type(error).__name__}", (), 0), None
    return Outcome("", tuple(done.tokens), done.cached), done


def block(number: int, stack: Stack) -> tuple[list[Outcome], float]:
    """Two remote hits, a local hit and two misses; returns how they ended and the median TTFT."""
    stack.client.reset_prefix_cache()
    first, second = HITS.values()
    fresh = [prompt(tokens, seed=81_000 + 10 * number + tokens) for tokens in (300, 700)]
    ended = [asked(stack, text, max_tokens=6) for text in (first, second, first, *fresh)]
    times = [done.ttft for _, done in ended if done is not None and done.ttft is not None]
    return [outcome for outcome, _ in ended], median(times)


def compared(engines: Prepared, name: str, mode: str, number: int, figure: Callable[[str], None]) -> int:
    """Paired blocks; the outcomes must be equal, and the difference in TTFT is told and bounded.

    In `auto` every second block finds slow stores, and a hit may also end as it did when it was computed; returns how
    many reads ended so.
    """
    gaps, refused = [], 0
    for index in range(BLOCKS):
        if mode == "auto":
            engines.both(partial(slowed, SLOW_GET_US * (index % 2)))
        (hooked, slow), (plain, fast) = engines.in_turn(partial(block, 100 * number + index), index)
        roads = [(other,) for other in plain]
        if mode == "auto":
            roads[:2] = [(other, engines.computed[seed]) for other, seed in zip(plain, HITS, strict=False)]
        assert all(mine in ways for mine, ways in zip(hooked, roads, strict=True)), (hooked, roads)
        assert [outcome.error for outcome in hooked] == [""] * 5
        assert [outcome.cached for outcome in plain] == [512, 1024, 512, 0, 0]
        refused += sum(mine != other for mine, other in zip(hooked, plain, strict=True))
        gaps.append(slow - fast)
    mean, low, high = interval(gaps)
    figure(
        f"{name}, {mode}: TTFT hook minus none {mean * 1e3:+.1f} ms [{low * 1e3:+.1f}, {high * 1e3:+.1f}], {BLOCKS} "
        f"paired blocks of 5 requests, "
        + (f"{refused} of {2 * BLOCKS} reads refused" if mode == "auto" else "all ended the same")
    )
    assert low < SLOWER
    return refused


def slowed(microseconds: int, stack: Stack) -> None:
    """The store answers each GET so much later, and nothing is left in LMCache's memory."""
    stack.commands.delay("GET", microseconds)
    stack.clear_l1()


def under(engines: Prepared, mode: str) -> None:
    """The hooked engine's service runs in `mode` from here on; in `auto` it has seen enough reads to have models."""
    engines.both(partial(slowed, 0))
    stack, key = engines.hooked, "KVGUARD_SERVE_DEFAULT_MODE"
    if stack.service_process.env[key] != mode:
        stack.service_process.stop()
        stack.service_process.env[key] = mode
        stack.service_process.start()
        polled(stack)
    if mode == "on":
        return
    texts = list(HITS.values())
    for index in range(LEARNT):
        if index % 8 == 0:
            stack.client.complete(prompt(400 + 40 * index, 83_000 + index), max_tokens=1)
        stack.drain()
        last = stack.client.complete(texts[index % 2], max_tokens=1)
    stack.service.request(last.request_id)
    wait_until(lambda: has_models(stack), 20, "the controller to have models")


def acting(engines: Prepared) -> None:
    """The stores get slow and the controller of the hooked engine keeps reads out."""
    engines.both(partial(slowed, SLOW_GET_US))
    wait_until(lambda: refuses(engines.hooked, HITS[8001]), 30, "the controller to act")


def has_models(stack: Stack) -> bool:
    """Whether the service projects both roads of the one engine."""
    (row,) = stack.service.get("/v1/offload")["engines"]
    return bool(row["projected"]) and None not in (row["projected"]["remote"], row["projected"]["recompute"])


def refuses(stack: Stack, text: str) -> bool:
    """Whether a stored prompt is computed."""
    stack.drain()
    return stack.client.complete(text, max_tokens=1).cached == 0


def counter(stack: Stack, name: str) -> int:
    """Sum of a metric of the service over its labels."""
    with urllib.request.urlopen(stack.service.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith((name + "{", name + " ")))


@pytest.fixture(scope="module")
def engines(stacks, lab_env: LabEnv) -> Iterator[Prepared]:
    """Both engines, the prompts of `HITS` in the store and nowhere else."""
    stacks.stop()
    with pair(StackConfig(command_proxy=True, hook_env={"KVGUARD_RING": str(RING)}), lab_env) as running:
        hooked, plain = running.both(stored)
        assert hooked == plain
        yield Prepared(*running, plain)


def stored(stack: Stack) -> dict[int, Outcome]:
    """How the prompts of `HITS` end when they are computed, which stores them."""
    ended = {seed: asked(stack, text, max_tokens=6)[0] for seed, text in HITS.items()}
    stack.drain()
    return ended


# -- Faults of the service ---------------------------------------------------------------------------------------------

CASES = [(fault, mode) for mode in MODES for fault in FAULTS] + ([] if LONG else [("killed", "auto")])


@pytest.mark.parametrize(("fault", "mode"), CASES)
def test_a_fault_of_the_service_changes_nothing(
    engines: Prepared, figure: Callable[[str], None], fault: str, mode: str
) -> None:
    if fault == "disk-full" and os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    under(engines, mode)
    if mode == "auto":
        acting(engines)
    polled(engines.hooked)
    number = list(FAULTS).index(fault) + len(FAULTS) * (mode == "auto")
    with FAULTS[fault](engines.hooked):
        refused = compared(engines, fault, mode, number, figure)
    assert refused == 0 if mode == "on" else refused > 0 or fault == "disk-full"  # that one starts without models
    polled(engines.hooked)
    engines.hooked.service.switch("off", wait=10)  # and it obeys again
    assert block(980 + number, engines.hooked)[0][0].cached == 0
    engines.hooked.service.clear()
    polled(engines.hooked)
    assert counter(engines.hooked, semconv.HOOK_ERRORS_TOTAL.name) == 0


def test_a_full_ring_drops_and_says_so(engines: Prepared, figure: Callable[[str], None]) -> None:
    hooked = engines.hooked
    texts = [prompt(40, seed) for seed in range(82_000, 82_120)]
    before = counter(hooked, semconv.HOOK_RECORDS_DROPPED.name)
    with killed(hooked):
        ended = []
        for part in range(4):
            mine, others = engines.in_turn(partial(burst, texts[30 * part : 30 * part + 30]), part)
            ended += mine
            assert [outcome for outcome, _ in mine] == [outcome for outcome, _ in others]
    polled(hooked)
    wait_until(lambda: counter(hooked, semconv.HOOK_RECORDS_DROPPED.name) > before, 30, "drops on /metrics")
    time.sleep(1.0)  # the rest of the ring and the last count
    dropped = counter(hooked, semconv.HOOK_RECORDS_DROPPED.name) - before
    missing = sum(hooked.service.call("GET", f"/v1/requests/{done.request_id}")[0] == 404 for _, done in ended)
    figure(f"ring of {RING}, {len(texts)} requests without a service: {dropped} records dropped, {missing} unheard of")
    assert all(not outcome.error for outcome, _ in ended)
    assert 0 < missing <= dropped
    assert missing < len(texts)  # the newest are kept


def burst(texts: list[str], stack: Stack) -> list[tuple[Outcome, Completion | None]]:
    """All at once, one token each: it needs no company to be decided."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda text: asked(stack, text, max_tokens=1), texts))


# -- Faults of what vLLM itself depends on, done to both engines -------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_redis_killed_while_it_is_read(engines: Prepared, figure: Callable[[str], None], mode: str) -> None:
    under(engines, mode)
    polled(engines.hooked)
    seeds = range(8300 + 50 * (mode == "auto"), 8400)
    texts = [prompt(1400, seed) for seed in seeds[1:4]] + [prompt(300, seeds[4])]

    def fault(stack: Stack) -> list[Outcome]:
        for text in texts[:3]:
            stack.client.complete(text, max_tokens=1)
        stack.drain()
        before = stack.redis.counts()["GET"]
        stack.commands.delay("GET", 300_000)
        with ThreadPoolExecutor(len(texts)) as pool:
            running = [pool.submit(asked, stack, text) for text in texts]
            wait_until(lambda: stack.redis.counts()["GET"] >= before + 2, 60, "reads under way")
            stack.redis_process.signal(signal.SIGKILL)
            outcomes = [one.result()[0] for one in running]
        stack.commands.delay("GET", 0)
        return outcomes

    began = time.monotonic()
    hooked, plain = engines.both(fault)
    took = time.monotonic() - began
    after = [engines.in_turn(lambda stack: asked(stack, prompt(300, seeds[10]))[0], 0)]
    for stack in engines:
        stack.redis_process.stop()
        stack.redis_process.start()
    after.append(engines.in_turn(lambda stack: asked(stack, prompt(700, seeds[11]))[0], 0))
    figure(
        f"Redis killed in mid-load, {mode}, {took:.1f} s: errors with hook {Counter(one.error for one in hooked)}, "
        f"without {Counter(one.error for one in plain)}; tokens loaded {[one.cached for one in hooked]} and "
        f"{[one.cached for one in plain]}"
    )
    assert [(one.error, one.tokens) for one in hooked] == [(one.error, one.tokens) for one in plain]
    for mine, other in after:
        assert mine == other
        assert mine.error == ""
    polled(engines.hooked)


def worker(stack: Stack) -> int:
    """Process id of vLLM's worker."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in stack.vllm.descendants()}
    return next(pid for pid, name in names.items() if "Worker" in name)


def test_worker_killed_while_it_computes(engines: Prepared, figure: Callable[[str], None]) -> None:
    """The last test with these engines: they end here."""
    under(engines, MODES[-1])
    texts = [prompt(100, seed) for seed in (8401, 8402, 8403)]

    def fault(stack: Stack) -> tuple[list[Outcome], Outcome, bool]:
        victim = worker(stack)
        with ThreadPoolExecutor(len(texts)) as pool:
            running = [pool.submit(asked, stack, text, max_tokens=4000) for text in texts]
            wait_until(lambda: running_requests(stack) == len(texts), 120, "requests to run")
            os.kill(victim, signal.SIGKILL)
            outcomes = [one.result()[0] for one in running]
        with contextlib.suppress(LabError):
            wait_until(lambda: not stack.vllm.alive, 60, "vLLM to end")
        return outcomes, asked(stack, texts[0])[0], stack.vllm.alive

    (hooked, plain) = engines.both(fault)
    figure(f"worker killed, {MODES[-1]}: with hook {hooked}, without {plain}")
    assert hooked == plain
    assert all(one.error for one in hooked[0])
    wait_until(lambda: missed(engines.hooked), 30, "the service to miss the engine")


def missed(stack: Stack) -> bool:
    """Whether the service knows the engine and calls it silent: at once after a crash's goodbye, else after a lease."""
    rows = stack.service.get("/v1/offload")["engines"]
    return bool(rows) and all(row["silent"] for row in rows)


def running_requests(stack: Stack) -> int:
    """Requests that vLLM says it is running."""
    for line in stack.client.get("/metrics").splitlines():
        if line.startswith("vllm:num_requests_running"):
            return int(float(line.rpartition(" ")[2]))
    return 0
