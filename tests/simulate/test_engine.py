import random
from typing import Any

import pytest

from guard.simulate.cache import BlockCache
from guard.simulate.clock import Schedule
from guard.simulate.engine import Engine
from guard.simulate.job import Job, Prompt
from guard.simulate.link import Link
from guard.simulate.policies import LEAVE, READ
from guard.simulate.records import record_of
from guard.simulate.scenario import Scenario, parse

QUIET = {"noise": 0.0, "intake_seconds": 0.0, "step_seconds": 0.01, "token_seconds": 1e-4, "attention_seconds": 0.0}
KINDS = ("lmcache-mp", "lmcache", "mooncake-store")


def scenario(kind: str = "lmcache-mp", *, engine: dict[str, Any] | None = None, **more: Any) -> Scenario:
    link = {"rtt": "1ms", "jitter": 0.0, "gbit": 80.0, **more.pop("link", {})}
    connector = {"kind": kind, "chunk_tokens": 100, "bytes_per_token": 1000, **more.pop("connector", {})}
    data = {"engine": {**QUIET, "decode_seconds": 0.0, **(engine or {})}, "connector": connector, "link": link, **more}
    return parse(data)


class Bench:
    """One engine whose every request reads, or none."""

    def __init__(self, made: Scenario, *, reads: bool = True) -> None:
        self.schedule = Schedule()
        self.scenario = made
        self.done: list[Job] = []
        self.open = 0
        self.reads = reads
        self.store = BlockCache(10_000)
        self.engine = Engine(
            0, made, schedule=self.schedule, link=Link(made.link, random.Random(0)), store=self.store, gates=self,
            sink=self, rng=random.Random(0),
        )  # fmt: skip

    def stores(self, engine: int) -> bool:
        return True

    def lookup(self, now: float, job: Job) -> Any:
        return READ if self.reads else LEAVE

    def load(self, now: float, job: Job) -> Any:
        return READ

    def opened(self, now: float, job: Job, *, fetch: bool) -> None:
        self.open += 1

    def closed(self, now: float, job: Job, *, fetch: bool, ok: bool) -> None:
        self.open -= 1

    def deadline(self, job: Job) -> float | None:
        return None

    def first(self, now: float, job: Job) -> None:
        self.done.append(job)

    def stored(self, now: float, job: Job, tokens: int, seconds: float) -> None:
        pass

    def finished(self, now: float, job: Job) -> None:
        pass

    def send(self, *prompts: tuple[float, Prompt]) -> list[Job]:
        jobs: list[Job] = []
        for at, prompt in prompts:
            self.schedule.at(at, lambda now, each=prompt: jobs.append(self.engine.arrive(now, each)))
        self.schedule.run_until(1e6)
        return jobs


def prompt(tokens: int, output: int = 1, first: int = 0) -> Prompt:
    return Prompt(tokens, output, tuple(range(first, first + tokens // 100)))


def test_prefill_of_an_idle_engine_is_the_formula_of_the_design():
    made = scenario(engine={"attention_seconds": 1e-8, "max_batched_tokens": 10_000})
    job = Bench(made, reads=False).send((0.0, prompt(4000)))[0]
    assert job.ttft == pytest.approx(0.01 + 1e-4 * 4000 + 1e-8 * 4000 * 2000)


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget():
    job = Bench(scenario(engine={"max_batched_tokens": 1000}), reads=False).send((0.0, prompt(4000)))[0]
    assert job.ttft == pytest.approx(4 * 0.01 + 0.4)
    assert job.computed == 4000


def test_prompts_share_a_step_while_the_budget_lasts():
    bench = Bench(scenario(engine={"max_batched_tokens": 1500}), reads=False)
    first, second = bench.send((0.0, prompt(1000)), (0.0, prompt(1000, first=100)))
    assert first.ttft == pytest.approx(0.01 + 0.1)  # alone: the other comes an instant later
    assert second.ttft == pytest.approx(first.ttft + 0.01 + 0.1)
    third, fourth, fifth = bench.send(*((10.0, prompt(1000, first=200 + 20 * n)) for n in range(3)))
    assert fourth.ttft == pytest.approx(0.11 + 0.16)  # with half of the fifth
    assert fifth.ttft == pytest.approx(0.11 + 0.16 + 0.06)
    assert third.ttft == pytest.approx(0.11)


def test_decoding_goes_on_beside_a_prefill_and_slows_it_down():
    bench = Bench(scenario(engine={"decode_seconds": 0.005}), reads=False)
    talker, other = bench.send((0.0, prompt(100, output=11)), (0.05, prompt(1000, first=50)))
    assert talker.tpot is not None
    assert talker.first == pytest.approx(0.02)
    # 15 ms a step; the newcomer waits for the step that runs, then computes in one with the talker's token
    assert other.first == pytest.approx(0.065 + 0.015 + 0.1)
    assert talker.finish == pytest.approx(other.first + 6 * 0.015)


def test_no_more_sequences_than_allowed_run():
    bench = Bench(scenario(engine={"max_seqs": 1}), reads=False)
    first, second = bench.send((0.0, prompt(100, output=5)), (0.0, prompt(100, first=50)))
    assert second.scheduled == pytest.approx(first.finish)


def test_kv_blocks_are_waited_for_and_given_back():
    bench = Bench(scenario(engine={"kv_tokens": 1500}), reads=False)
    first, second = bench.send((0.0, prompt(1000, output=5)), (0.0, prompt(1000, first=50)))
    assert second.scheduled == pytest.approx(first.finish)
    assert bench.engine.batch.kv_used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_remote_hit_costs_its_round_trips_and_bytes_and_saves_its_prefill(kind: str):
    bench = Bench(scenario(kind, connector={"lookup_seconds": 0.002, "fetch_seconds": 0.003}))
    bench.store.put(tuple(range(40)))
    job = bench.send((0.0, prompt(4050)))[0]
    assert (job.matched, job.loaded, job.local, job.computed) == (4000, 4000, 0, 50)
    trips = 40 * 0.001 + 40 * 0.001  # a lookup and a read per chunk
    assert job.ttft == pytest.approx(0.002 + 0.003 + trips + 4e6 / 1e10 + 0.01 + 0.005, rel=1e-3)
    assert bench.open == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_miss_pays_its_lookup_and_is_stored_and_found_locally_next_time(kind: str):
    bench = Bench(scenario(kind, connector={"lookup_seconds": 0.0}))
    miss, again = bench.send((0.0, prompt(1000)), (10.0, prompt(1000)))
    assert miss.ttft == pytest.approx(10 * 0.001 + 0.01 + 0.1, rel=1e-6)
    assert bench.store.peek(miss.prompt.blocks) == 10
    assert again.local == 900  # never all of a prompt


def test_a_synchronous_lookup_and_load_hold_the_others_up_an_asynchronous_one_does_not():
    for kind, held in (("lmcache", True), ("lmcache-mp", False)):
        bench = Bench(scenario(kind, link={"rtt": "100ms"}, connector={"lookup_seconds": 0.0, "fetch_seconds": 0.0}))
        bench.store.put(tuple(range(10)))
        bench.reads = True
        slow = Prompt(1050, 1, tuple(range(10)))
        jobs = bench.send((0.0, slow), (0.001, Prompt(90, 1)))
        assert (jobs[1].ttft > 1.0) is held


def test_a_failed_load_is_computed_and_its_time_is_lost():
    bench = Bench(scenario(connector={"failures": 1.0, "lookup_seconds": 0.0, "fetch_seconds": 0.5}))
    bench.store.put(tuple(range(10)))
    job = bench.send((0.0, prompt(1050)))[0]
    assert (job.loaded, job.computed, job.failed) == (0, 1050, True)
    assert job.ttft == pytest.approx(0.020 + 0.0001 + 0.5 + 0.01 + 0.105, rel=1e-3)
    assert record_of(job, bench.scenario, job.first).reason == "load-failed"


@pytest.mark.parametrize("kind", KINDS)
def test_aborted_requests_leave_nothing_behind(kind: str):
    made = scenario(kind, engine={"kv_tokens": 20_000}, abort=0.5, link={"rtt": "50ms"}, seed=3)
    bench = Bench(made)
    bench.store.put(tuple(range(1000)))
    jobs = bench.send(*((0.1 * n, prompt(1050, output=5, first=10 * (n % 90))) for n in range(200)))
    assert 40 < sum(job.aborted > 0 for job in jobs) < 160
    assert all(job.first or job.aborted for job in jobs)
    assert (bench.engine.batch.kv_used, bench.engine.waiting, bench.engine.batch.running, bench.open) == (0, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_ttft_add_up_and_a_record_tells_the_decision(kind: str):
    bench = Bench(scenario(kind, engine={"noise": 0.1, "intake_seconds": 0.002}))
    bench.store.put(tuple(range(400)))
    jobs = bench.send(*((0.05 * n, prompt(500 + 10 * n, output=20, first=(37 * n) % 800)) for n in range(100)))
    for job in jobs:
        row = record_of(job, bench.scenario, job.first)
        parts = row.intake + row.queue + row.lookup + row.slot + row.fetch + row.resume + row.prefill
        assert row.ttft == pytest.approx(parts, abs=1e-9)
        assert row.tokens_local + row.tokens_loaded + row.tokens_computed == row.prompt_tokens
        assert row.decision == ("remote" if row.tokens_loaded else "none")
        assert row.rtt == 0.001
    assert {record_of(job, bench.scenario, job.first).decision for job in jobs} == {"remote", "none"}


def test_a_cache_drops_what_was_not_used_for_longest():
    cache = BlockCache(3)
    assert cache.put((1, 2, 3)) == 3
    assert cache.matched((1, 9)) == 1
    assert cache.put((4,)) == 1
    assert [cache.peek((n,)) for n in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert cache.put((4, 1)) == 0
