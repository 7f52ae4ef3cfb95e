"""Offload switched while vLLM serves: how fast it takes effect, and what the store still sees.

Requests are sent after the hook has acknowledged; Redis's own command counts say what they caused.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from statistics import median

import pytest

from lab.client import prompt
from lab.config import StackConfig
from lab.processes import wait_until
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
ROUNDS = 30
NOTHING: Counter[str] = Counter()


@pytest.fixture(scope="module", params=[False, True], ids=["lookup-when-scheduled", "eager-prefetch"])
def config(request: pytest.FixtureRequest, forward: dict[str, str]) -> StackConfig:
    """The second one runs without vLLM's own spans: nothing here needs them."""
    if request.param:
        return StackConfig(eager_prefetch=True, command_proxy=True, service_env=forward)
    return StackConfig(otlp="service", command_proxy=True, service_env=forward)


@pytest.fixture
def stack(stacks, config: StackConfig) -> Stack:
    """The running stack, everything on, with KV in the store only."""
    return stacks.get(config)


def row(stack: Stack) -> dict:
    """What the service says of the one engine."""
    (found,) = stack.service.get("/v1/offload")["engines"]
    return found


def acknowledged(stack: Stack, mode: str, timeout: float = 10.0) -> float:
    """Waits until the hook says that it applies `mode`; Unix time at which the service heard of it."""
    found: dict = {}

    def applied() -> bool:
        found.update(row(stack))
        return found["mode"] == mode and found["acknowledged"]

    wait_until(applied, timeout, f"the hook to acknowledge {mode}")
    return datetime.fromisoformat(found["acknowledged_at"]).timestamp()


def switched(stack: Stack, mode: str, **fields: object) -> None:
    """Switches the fleet and waits for the acknowledgement."""
    answer = stack.service.switch(mode, wait=10, **fields)
    assert (len(answer["acknowledged"]), answer["pending"]) == (1, [])


def commands_of(stack: Stack, *texts: str) -> Counter[str]:
    """Redis's commands while these prompts are served at once, stores included, vLLM's own cache empty before."""
    stack.client.reset_prefix_cache()
    with stack.redis.counting() as commands, ThreadPoolExecutor(8) as pool:
        list(pool.map(stack.client.complete, texts))
        stack.settle_stores()
    return commands.delta


def stored(stack: Stack, *seeds: int, chunks: int = 4) -> list[str]:
    """Prompts that are in the store and nowhere else."""
    texts = [prompt(chunks * CHUNK + 60, seed) for seed in seeds]
    for text in texts:
        stack.client.complete(text, max_tokens=1)
    stack.drain()
    return texts


@contextmanager
def busy(stack: Stack) -> Iterator[None]:
    """Keeps the engine at work with requests too short for the store."""
    stop = threading.Event()

    def work(seed: int) -> None:
        while not stop.is_set():
            stack.client.complete(prompt(CHUNK - 60, seed), max_tokens=32)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (7001, 7002, 7003)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_switches_take_effect_within_a_second(stack: Stack, figure: Callable[[str], None]) -> None:
    (text,) = stored(stack, 7100, chunks=2)
    delays: dict[str, list[float]] = {"off": [], "on": []}
    seen: dict[str, Counter[str]] = {"off": Counter(), "on": Counter()}

    with busy(stack):
        for mode in ("off", "on") * ROUNDS:
            stack.service.switch(mode)
            answered = time.time()
            delays[mode].append(max(0.0, acknowledged(stack, mode) - answered))
            with stack.redis.counting() as commands:
                stack.client.complete(text, max_tokens=1)
            seen[mode] += commands.delta

    both = sorted(delays["off"] + delays["on"])
    p99 = both[math.ceil(0.99 * len(both)) - 1]
    figure(
        f"{len(both)} switches on a busy engine, answer to acknowledgement: p50 {median(both) * 1e3:.1f} ms, "
        f"p99 {p99 * 1e3:.1f} ms; Redis while off {dict(seen['off'])}, while on {dict(seen['on'])}"
    )
    assert len(both) >= 50
    assert p99 <= 1.0
    assert seen["off"] == NOTHING
    assert seen["on"]["EXISTS"] == 2 * ROUNDS  # a local hit is looked up all the same


def test_off_stops_the_reads_of_stored_prefixes(stack: Stack, figure: Callable[[str], None]) -> None:
    texts = stored(stack, 7201, 7202, 7203, 7204)
    before = commands_of(stack, *texts)
    stack.drain()
    switched(stack, "off", reason="test")

    one, all_at_once = commands_of(stack, texts[0]), commands_of(stack, *texts)
    local = stack.client.complete(texts[1])
    record = stack.service.request(local.request_id)
    with stack.redis.counting() as of_local:
        again = stack.client.complete(texts[1])
    switched(stack, "on")
    after = commands_of(stack, *texts)
    figure(f"4 stored prefixes: on {dict(before)}, off {dict(all_at_once)}, on again {dict(after)}")

    assert before == Counter(EXISTS=16, GET=16)  # so a hit in `on` writes nothing
    assert one == all_at_once == of_local.delta == NOTHING
    assert again.cached == local.cached > 4 * CHUNK - 128  # vLLM's own cache works as ever
    assert (record["decision"], record["reason"]) == ("skip", "off")
    assert after == Counter(EXISTS=16, GET=16)


def test_new_prefixes_are_stored_while_off(stack: Stack, figure: Callable[[str], None]) -> None:
    (old,) = stored(stack, 7301)
    new, longer = prompt(3 * CHUNK + 60, 7302), old[: 4 * CHUNK] + prompt(2 * CHUNK + 60, 7303)
    switched(stack, "off")

    first, again, extended = commands_of(stack, new), commands_of(stack, new), commands_of(stack, longer)
    switched(stack, "on")
    stack.drain()
    hit = commands_of(stack, longer)
    figure(f"off: new {dict(first)}, the same again {dict(again)}, stored and a new end {dict(extended)}")

    assert first == Counter(SET=3)
    assert again == NOTHING
    assert extended == Counter(SET=2)
    assert hit == Counter(EXISTS=6, GET=6)  # what was written while off is whole


def test_without_stores_the_store_sees_nothing(stack: Stack, figure: Callable[[str], None]) -> None:
    (old,) = stored(stack, 7401)
    new = [prompt(3 * CHUNK + 60, seed) for seed in (7402, 7403)]
    switched(stack, "off", stores=False)

    none = commands_of(stack, old, *new)
    switched(stack, "off", stores=True)
    written = commands_of(stack, new[0])
    figure(f"off without stores, a hit and two misses: {dict(none)}; with stores again, a miss: {dict(written)}")

    assert none == NOTHING
    assert written == Counter(SET=3)  # it was not taken for stored


def test_on_without_stores_reads_and_does_not_write(stack: Stack) -> None:
    (old,) = stored(stack, 7501)
    switched(stack, "on", stores=False)

    seen = commands_of(stack, old, prompt(3 * CHUNK + 60, 7502))

    assert seen == Counter(EXISTS=4 + 3, GET=4)


def test_a_switch_with_a_ttl_ends_by_itself(stack: Stack, figure: Callable[[str], None]) -> None:
    (text,) = stored(stack, 7601)
    ttl = 6.0
    began = time.time()
    switched(stack, "off", ttl_seconds=ttl)

    off = commands_of(stack, text)
    in_time = time.time() - began < ttl
    ended = acknowledged(stack, "on", timeout=ttl + 5.0) - began
    on = commands_of(stack, text)
    figure(f"TTL {ttl:g} s: acknowledged as ended {ended:.2f} s after the switch was asked for")

    assert in_time, "the machine was too slow for this test"
    assert off == NOTHING
    assert ttl <= ended <= ttl + 1.5
    assert on == Counter(EXISTS=4, GET=4)


def test_switches_in_the_middle_of_lookups_and_loads_disturb_nobody(
    stack: Stack, figure: Callable[[str], None]
) -> None:
    texts = stored(stack, *range(7700, 7712))
    expected = [stack.client.complete(text, max_tokens=4).tokens for text in texts]
    stack.drain()
    stack.injector.rtt(20_000)  # a hit takes 8 round trips, so that most switches fall into one
    modes: Counter[str] = Counter()

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(stack.client.complete, text, max_tokens=4) for text in texts]
        while not all(answer.done() for answer in answers):
            for mode in ("off", "on"):
                stack.service.switch(mode)
                acknowledged(stack, mode)
                modes[mode] += 1
                time.sleep(0.1)
    records = [stack.service.request(answer.result().request_id) for answer in answers]
    decisions = Counter(record["decision"] for record in records)
    figure(f"{modes.total()} switches during {len(texts)} hits: {dict(decisions)}")

    assert decisions.keys() <= {"remote", "decline", "skip"}
    assert len(decisions) > 1
    assert [len(answer.result().tokens) for answer in answers] == [len(tokens) for tokens in expected]
    for record, answer in zip(records, answers, strict=True):
        loaded = 4 * CHUNK if record["decision"] == "remote" else 0
        assert (record["tokens"]["remote_loaded"], answer.result().cached) == (loaded, loaded)
        assert [fetch["outcome"] for fetch in record["fetches"]] == ["ok"] * (loaded > 0)
    wait_until(lambda: idle(stack), 20, "LMCache to have no lock, job or session left")


def idle(stack: Stack) -> bool:
    """Whether LMCache's server holds nothing for anybody."""
    status = stack.lmcache_status()
    locks = status["storage_manager"]["l1_manager"]
    left = locks["read_locked_count"] + locks["write_locked_count"] + status["active_prefetch_jobs"]
    return left + status["active_sessions"] == 0
