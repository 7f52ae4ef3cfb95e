"""The hook while the controller acts: the same invariants, and what it does by its own evidence."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from guard import gate, semconv
from guard.hook import attach
from guard.hook.connector import guarded
from guard.hook.failsafe import Failsafe
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.table import RequestTable
from guard.hook.worker import Contexts
from guard.pace import PERMIT_NS, Pace
from guard.wire import Directive, Reads, Span
from tests.hook.fake_engine import FakeEngine
from tests.hook.fakes_vllm import SCHEDULER, Clock, FakeBlocks, FakeConnector, MooncakeStoreConnector, vllm_config

FETCH = {"seconds": 0.05, "lookup_seconds": 0.001, "spread": 0.05, "bytes_per_token": 1000.0}
PREFILL = {"b": 1e-4}
AUTO = Directive(
    id="d", engine_id="h:1/0", backend="x", fetch=FETCH, prefill=PREFILL, classes={"all": {"hit": 0.9, "tokens": 2048}}
)


class Process:
    """What the guarded connectors of one process share, without threads."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine_id = "h:1/0"
        self.failsafe = Failsafe(limit=1)
        self.recorder = Recorder(100_000)
        self.scope = Scope(self.engine_id, "tiny")
        self.table = RequestTable(
            self.recorder, self.scope, clock=self.clock, wall=self.clock.wall, rng=random.Random(1)
        )
        self.contexts = Contexts()
        self.boot = "boot"
        self.rank = 0
        self.directive: Directive | None = AUTO

    def current(self, backend: str) -> Directive | None:
        return self.directive

    def join(self, backend: Any, *, scheduler: bool) -> int:
        return 1

    def leave(self) -> None: ...

    def requests(self) -> list[Span]:
        spans = [span for record in self.recorder.drain(10**6) for span in record.spans()]
        return [span for span in spans if span.name == semconv.SPAN_REQUEST]

    @property
    def pace(self) -> Pace:
        (found,) = self.table.paces.values()
        return found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(attach, "runtime_for", lambda config: made)
    return made


def engine(process: Process, inner: type = FakeConnector, **kwargs: Any) -> FakeEngine:
    return FakeEngine(guarded(inner)(vllm_config(), SCHEDULER, None), process.clock, **kwargs)


def asks(one: FakeEngine, request_id: str) -> tuple[int | None, bool]:
    request = one.add(request_id)
    answer: tuple[int | None, bool] = one.connector.get_num_new_matched_tokens(request, 0)
    if answer[0]:
        one.connector.update_state_after_alloc(request, FakeBlocks(1), answer[0])
    return answer


CHOICES = (
    None,
    AUTO,
    replace(AUTO, id="on", mode=semconv.MODE_ON),
    replace(AUTO, id="off", mode=semconv.MODE_OFF),
    replace(AUTO, id="observe", mode=semconv.MODE_OBSERVE, state="bypass"),
    replace(AUTO, id="bypass", state="bypass", reads=Reads(share=0.0)),
    replace(AUTO, id="half", state="half-open", reads=Reads(share=0.0, trickle_seconds=0.02)),
    replace(AUTO, id="tight", state="limited", reads=Reads(max_inflight=2, share=0.5, holdout=0.2)),
    replace(AUTO, id="dear", fetch={**FETCH, "seconds": 9.0}),
)


@pytest.mark.parametrize("inner", [FakeConnector, MooncakeStoreConnector])
@pytest.mark.parametrize("seed", range(3))
def test_a18_a_thousand_toggles_under_load_strand_nothing(process: Process, seed: int, inner: type) -> None:
    rng = random.Random(seed)
    toggles = 0

    def toggle() -> None:
        nonlocal toggles
        if rng.random() < 0.2:
            process.directive = rng.choice(CHOICES)
            toggles += 1

    one = engine(process, inner, seed=seed, moment=toggle, fails=lambda _: rng.random() < 0.1)
    added = 0
    while toggles < 1000:
        for _ in range(rng.randrange(4)):
            one.add(f"r{added}", rng.randrange(1000, 8000))
            added += 1
        if added and rng.random() < 0.05:
            one.abort(f"r{rng.randrange(added)}")
        one.step(rng.uniform(1, 80))
    one.drain()
    assert len(one.finished) == added
    assert len(set(one.finished)) == added
    assert process.failsafe.errors == 0
    assert len(process.table) == 0
    assert (process.table.backlog, process.table.waiting) == (0, 0)
    process.pace.age_out(process.clock() + PERMIT_NS)
    assert (process.pace.inflight, process.pace.inflight_bytes) == (0, 0)
    told = process.requests()
    assert len(told) == added
    assert sum(span.attributes[semconv.DECISION] == "remote" for span in told) > 0.1 * added


def test_a_request_whose_load_failed_fails_once_and_recomputes(process: Process) -> None:
    for mode in (semconv.MODE_AUTO, semconv.MODE_ON):
        process.directive = replace(AUTO, mode=mode)
        one = engine(process, fails=lambda _: True)
        for number in range(2):  # two, so that the breaker stays out of it
            one.add(f"{mode}-{number}")
        one.drain()
        assert set(one.loads.values()) == {1}
    assert {span.attributes[semconv.DECISION_REASON] for span in process.requests()} == {gate.LOAD_FAILED}


def test_without_a_lease_a_failed_load_is_matched_again_as_without_kvguard(process: Process) -> None:
    process.directive = None
    one = engine(process)
    one.fails = lambda name: one.loads[name] < 3
    one.add("a")
    one.drain()
    assert one.loads == {"a": 3}


def test_failures_in_a_row_keep_new_requests_out_until_one_may_try(process: Process) -> None:
    one = engine(process, fails=lambda _: True)
    for number in range(3):
        one.add(f"a{number}")
        one.drain()
    one.add("late")
    one.drain()
    assert "late" not in one.loads
    process.clock.tick(11_000)
    one.fails = lambda _: False
    one.add("later")
    one.drain()
    assert one.loads["later"] == 1


def test_new_requests_are_not_sent_into_a_stalled_link(process: Process) -> None:
    one = engine(process)
    assert asks(one, "a") == (2048, True)
    process.clock.tick(60)
    assert asks(one, "b") == (2048, True)  # within what is projected
    process.clock.tick(200)  # the first is 0.26 s old: five times its projection, a read saves 0.2 s
    assert asks(one, "c") == (0, False)
    process.directive = replace(AUTO, mode=semconv.MODE_OBSERVE)
    assert asks(one, "d") == (2048, True)
    process.directive = None  # no lease: as without kvguard
    assert asks(one, "e") == (2048, True)


def test_reads_that_took_long_keep_new_ones_out_and_quick_ones_do_not(process: Process) -> None:
    quick, slow = engine(process), engine(process)
    for number in range(5):
        quick.add(f"q{number}")
        quick.drain()
    for number in range(2):
        request = slow.add(f"s{number}")
        slow.connector.get_num_new_matched_tokens(request, 0)
        slow.connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
    process.clock.tick(1000)
    for number in range(2):
        process.table.loaded({f"s{number}"})
        slow.abort(f"s{number}")  # an empty engine: nobody but the new request pays
    assert asks(slow, "after") == (0, False)
    assert set(quick.loads.values()) == {1}


def test_a_trickle_passes_tagged_one_at_a_time(process: Process) -> None:
    process.directive = replace(AUTO, state="half-open", reads=Reads(share=0.0, trickle_seconds=0.5))
    one = engine(process)
    one.add("first")
    one.add("second")
    one.drain()
    assert one.loads == {"first": 1}
    process.clock.tick(600)
    one.add("third")
    one.drain()
    assert one.loads == {"first": 1, "third": 1}
    reasons = {span.attributes[semconv.INTERNAL_ID]: span.attributes for span in process.requests()}
    assert reasons["first"][semconv.DECISION_REASON] == gate.TRICKLE
    assert reasons["second"][semconv.DECISION_REASON] == gate.BYPASS


def test_a_trickle_that_found_nothing_does_not_count(process: Process) -> None:
    process.directive = replace(AUTO, state="half-open", reads=Reads(share=0.0, trickle_seconds=0.9))
    one = engine(process, MooncakeStoreConnector)
    one.connector.match = (0, False)
    one.add("miss")
    one.drain()
    one.connector.match = (2048, True)
    one.add("hit")
    one.drain()
    assert one.loads == {"hit": 1}


def test_held_out_requests_carry_the_propensity_of_their_road(process: Process) -> None:
    process.directive = replace(AUTO, reads=Reads(holdout=0.25))
    one = engine(process)
    for number in range(200):
        one.add(f"r{number}")
        one.drain()
    told = process.requests()
    held = [span for span in told if span.attributes[semconv.DECISION_REASON] == gate.HOLDOUT]
    rest = [span for span in told if span.attributes[semconv.DECISION_REASON] == gate.AUTO]
    assert len(held) + len(rest) == 200
    assert 30 <= len(held) <= 70
    assert {span.attributes[semconv.PROPENSITY] for span in held} == {0.25}
    assert {span.attributes[semconv.PROPENSITY] for span in rest} == {0.75}
    process.directive = AUTO
    one.add("plain")
    one.drain()
    assert semconv.PROPENSITY not in process.requests()[0].attributes


def test_a20_lookups_that_cannot_pay_are_left_out(process: Process) -> None:
    """61 % of the requests of a trace find 512 tokens or fewer: here those save 0.05 s and a read takes 0.08 s."""
    classes = {"all": {"hit": 0.9, "tokens": 4000}, "0-512/c0-4": {"hit": 0.9, "tokens": 400}}
    process.directive = replace(AUTO, fetch={**FETCH, "seconds": 0.08}, classes=classes)
    one = engine(process, MooncakeStoreConnector)
    small = one.add("small", 500)
    assert one.connector.get_num_new_matched_tokens(small, 0) == (0, False)
    assert "get_num_new_matched_tokens" not in one.connector.calls
    one.drain()
    large = one.add("large", 6000)
    assert one.connector.get_num_new_matched_tokens(large, 0) == (2048, True)


def test_the_backlog_is_what_still_has_to_be_computed(process: Process) -> None:
    one = engine(process)
    a = one.add("a", 4000)
    assert process.table.backlog == 4000
    one.connector.get_num_new_matched_tokens(a, 1000)
    assert process.table.backlog == 3000
    assert process.table.waiting == 1
    one.connector.update_state_after_alloc(a, FakeBlocks(1), 2048)
    assert (process.table.backlog, process.table.waiting) == (0, 0)  # it waits for the link
    process.table.loaded({"a"})
    assert (process.table.backlog, process.table.waiting) == (952, 1)
    one.abort("a")
    assert process.table.backlog == 0


def test_what_is_in_flight_is_told_as_the_service_reads_it(process: Process) -> None:
    from guard.hook.runtime import reads_in_flight

    assert reads_in_flight(process.table) == ""
    one = engine(process)
    asks(one, "a")
    process.clock.tick(1500)
    ((label, told),) = json.loads(reads_in_flight(process.table)).items()
    assert told == [1, 0, 1.5]  # no geometry, so no bytes
    process.table.loaded({"a"})
    assert reads_in_flight(process.table) == ""
    assert label.startswith("fakeconnector")
