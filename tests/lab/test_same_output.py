"""A request gives what the unhooked engine gives on the same road, while offload is switched under it at random.

The road of every request is taken from the service's record (local hits, tokens loaded from the store) and, for local
hits, from how the cache was filled. The unhooked engine then serves the same prompt on the same road. Alone on the
engine the answers must be equal within the unhooked engine's own repeats; in company, where vLLM itself computes in
other batches, token ids must be equal wherever the two best tokens are further apart than the unhooked engine's noise.

`KVGUARD_LAB_FULL=1` sends 500 requests; without it there are 120, so that CI is done in time.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from lab.client import Completion, prompt
from lab.config import StackConfig
from lab.env import LabEnv
from lab.pair import Pair, pair
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
REQUESTS = 500 if os.environ.get("KVGUARD_LAB_FULL") == "1" else 120
WAVE = 4
OUTPUT = 14
REPEATS = 2
NOISE_WAVES = 4

WHOLE = {tokens: tokens // CHUNK * CHUNK for tokens in (300, 420, 530, 700, 850, 1050, 1300, 1600)}
PART = {tokens: tokens // CHUNK * CHUNK // 2 for tokens in (1100, 1150, 1620, 1700)}
STORED = WHOLE | PART
"""Prompts by their length, and how many of their tokens the store holds."""


@dataclass(frozen=True)
class Road:
    """How a prompt's KV came to be."""

    tokens: int
    local: int  # found in vLLM's own cache
    loaded: int
    after: int | None  # what the request that filled vLLM's cache had loaded; None: the cache was empty


@dataclass
class Sent:
    """A request to the hooked engine."""

    tokens: int
    done: Completion
    fill: "Sent | None" = None  # the request that filled vLLM's cache with this prompt, where it was in there
    record: dict = field(default_factory=dict)

    @property
    def road(self) -> Road:
        """Which road it took, by the service's record."""
        local, loaded = self.record["tokens"]["local"], self.record["tokens"]["remote_loaded"]
        return Road(self.tokens, local, loaded, self.fill.road.loaded if local and self.fill else None)


def text(tokens: int) -> str:
    return prompt(tokens, seed=9000 + tokens)


def ask(stack: Stack, tokens: int) -> Completion:
    return stack.client.complete(
        text(tokens), max_tokens=OUTPUT, logprobs=2, frequency_penalty=1.0, return_tokens_as_token_ids=True
    )


def fill_store(stack: Stack) -> None:
    """Leaves what `STORED` says in the store, and nothing anywhere else."""
    stack.redis.flush()
    stack.drain()
    for tokens, stored in STORED.items():
        stack.client.complete(text(tokens) if tokens in WHOLE else text(tokens)[:stored] + "x", max_tokens=1)
    stack.drain()


class Reference:
    """Answers of the unhooked engine by road, each asked for when it is first needed."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._known: dict[Road, list[Completion]] = {}

    def __getitem__(self, road: Road) -> list[Completion]:
        if road not in self._known:
            self._known[road] = [self._serve(road) for _ in range(REPEATS)]
        return self._known[road]

    def __len__(self) -> int:
        return len(self._known)

    def _serve(self, road: Road) -> Completion:
        loaded = road.loaded if road.after is None else road.after
        self._stack.redis.flush()
        self._stack.drain()
        if loaded:
            stored = text(road.tokens) if loaded == WHOLE.get(road.tokens) else text(road.tokens)[:loaded] + "x"
            self._stack.client.complete(stored, max_tokens=1)
            self._stack.drain()
        done = ask(self._stack, road.tokens)
        assert done.cached == loaded, road
        if road.after is not None:
            done = ask(self._stack, road.tokens)
        assert done.cached == road.local + road.loaded, road
        return done


def margins(done: Completion) -> list[float]:
    """Distance between the two best tokens' logprobs, per position."""
    return [best - second for best, second in (sorted(top.values(), reverse=True)[:2] for top in done.top)]


def difference(one: Completion, other: Completion) -> float:
    """Greatest difference in logprob as far as the tokens agree; where they part, at least how close the two were."""
    far = 0.0
    for position, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if mine != theirs:
            return max(far, margins(other)[position])
        far = max(far, abs(one.logprobs[position] - other.logprobs[position]))
    return far


def parts_where_it_may(done: Completion, reference: Completion, noise: float) -> bool:
    """Whether the token ids are equal up to the first position where the reference itself is undecided."""
    for mine, theirs, margin in zip(done.tokens, reference.tokens, margins(reference), strict=True):
        if mine != theirs:
            return margin <= noise
    return True


def waves(rng: random.Random, count: int) -> list[list[int]]:
    """So many groups of distinct prompts."""
    return [rng.sample(sorted(STORED), WAVE) for _ in range(count)]


def together(stack: Stack, wave: list[int]) -> list[Completion]:
    with ThreadPoolExecutor(WAVE) as pool:
        return list(pool.map(lambda tokens: ask(stack, tokens), wave))


@contextmanager
def toggling(stack: Stack, seed: int) -> Iterator[Counter[str]]:
    """Switches offload at random moments and waits for nothing; counts the switches."""
    rng, stop, made = random.Random(seed), threading.Event(), Counter()

    def work() -> None:
        while not stop.wait(rng.uniform(0.05, 0.8)):
            mode = rng.choices(("on", "auto", "off"), (2, 1, 2))[0]
            stack.service.switch(mode, stores=False)
            made[mode] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def engines(stacks, lab_env: LabEnv) -> Iterator[Pair]:
    """Both engines with the same store."""
    stacks.stop()
    config = StackConfig(
        vllm_args=("--logprobs-mode", "processed_logprobs"),  # what the penalty leaves is compared
        service_env={"KVGUARD_SERVE_WINDOW_SECONDS": "7200"},  # the records are asked for at the end
    )
    with pair(config, lab_env) as running:
        running.both(fill_store)
        assert running.hooked.service.switch("on", wait=10, stores=False)["pending"] == []
        yield running


def served(stack: Stack, groups: list[list[int]], rng: random.Random) -> list[Sent]:
    """Sends groups of prompts, each group at once, mostly with vLLM's own cache emptied before.

    vLLM keeps its cache where a block is still held when it is asked to empty it, so what filled it is told by the
    records: the last request for the prompt that found nothing there.
    """
    stack.drain()
    sent: list[Sent] = []
    for group in groups:
        if rng.random() < 0.8:
            stack.client.reset_prefix_cache()
        sent += [Sent(tokens, done) for tokens, done in zip(group, together(stack, group), strict=True)]
    fillers: dict[int, Sent] = {}
    for one in sent:
        one.record = stack.service.request(one.done.request_id)
        if one.record["tokens"]["local"]:
            one.fill = fillers[one.tokens]
        else:
            fillers[one.tokens] = one
    return sent


def roads(sent: list[Sent]) -> Counter[str]:
    """Requests by what the hook decided and by where their KV came from."""
    kinds: Counter[str] = Counter()
    for one in sent:
        tokens = one.record["tokens"]
        kinds["remote" if tokens["remote_loaded"] else "local" if tokens["local"] else "recompute"] += 1
        assert one.done.cached == tokens["local"] + tokens["remote_loaded"]
        assert (one.record["decision"] == "remote") == bool(tokens["remote_loaded"]), one.record["decision"]
    return kinds


def test_alone_answers_are_those_of_the_unhooked_engine(engines: Pair, figure: Callable[[str], None]) -> None:
    rng = random.Random(1)
    order = [[rng.choice(sorted(STORED))]]
    while len(order) < REQUESTS // 2:
        order.append(order[-1] if rng.random() < 0.2 else [rng.choice(sorted(STORED))])
    with toggling(engines.hooked, 1) as switches:
        sent = served(engines.hooked, order, rng)

    kinds, reference = roads(sent), Reference(engines.plain)
    worst = own = 0.0
    for one in sent:
        repeats = reference[one.road]
        spread = max(difference(a, b) for a in repeats for b in repeats)
        away = min(difference(one.done, repeat) for repeat in repeats)
        worst, own = max(worst, away), max(own, spread)
        assert one.done.tokens in [repeat.tokens for repeat in repeats], one.road
        assert away <= spread, one.road
    figure(
        f"{len(sent)} requests alone, {len({one.tokens for one in sent})} prompts, roads {dict(kinds)}, switches "
        f"{dict(switches)}; {len(reference)} roads asked of the unhooked engine; logprobs differ by at most "
        f"{worst:.2e}, its own repeats by {own:.2e}"
    )
    assert len({one.tokens for one in sent}) >= 8
    assert len({tuple(one.done.tokens) for one in sent}) >= 8
    assert kinds["remote"] >= 0.3 * len(sent)
    assert kinds["recompute"] > 0.1 * len(sent)
    assert kinds["local"] > 0
    assert min(switches.values()) > 0


def test_in_company_tokens_are_equal_where_the_engine_is_decided(engines: Pair, figure: Callable[[str], None]) -> None:
    rng = random.Random(2)
    with toggling(engines.hooked, 2) as switches:
        sent = served(engines.hooked, waves(rng, REQUESTS // 2 // WAVE), rng)

    kinds, reference = roads(sent), Reference(engines.plain)
    noise = max(unhooked_noise(engines.plain, reference, waves(random.Random(3), NOISE_WAVES)))
    away = [min(difference(one.done, repeat) for repeat in reference[one.road]) for one in sent]
    undecided = sum(margin <= noise for one in sent for margin in margins(reference[one.road][0]))
    figure(
        f"{len(sent)} requests in waves of {WAVE}, roads {dict(kinds)}, switches {dict(switches)}; logprobs differ by "
        f"at most {max(away):.2e}, the unhooked engine's own between company and alone by {noise:.2e}; {undecided} of "
        f"{len(sent) * OUTPUT} tokens undecided"
    )
    for one in sent:
        assert any(parts_where_it_may(one.done, repeat, noise) for repeat in reference[one.road]), one.road
    assert kinds["remote"] >= 0.3 * len(sent)
    assert kinds["recompute"] > 0.1 * len(sent)
    assert undecided < 0.1 * len(sent) * OUTPUT


def unhooked_noise(stack: Stack, reference: Reference, groups: list[list[int]]) -> Iterator[float]:
    """How far the unhooked engine's answers in company are from its own answers alone, by road."""
    seen: list[tuple[int, Completion]] = []
    fill_store(stack)
    for wave in groups:  # loaded
        stack.drain()
        seen += zip(wave, together(stack, wave), strict=True)
    for wave in groups:  # computed
        stack.redis.flush()
        stack.drain()
        seen += zip(wave, together(stack, wave), strict=True)
    for tokens, done in seen:
        road = Road(tokens, 0, done.cached, None)
        yield min(difference(done, repeat) for repeat in reference[road])
