"""What counts as evidence that a link has healed, and what is only the tail of what was. Single steps, no loop."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from guard.control.controller import decide
from guard.control.memory import from_json, to_json
from guard.control.projection import costs_of
from guard.control.shapes import BYPASS, HALF_OPEN, OPEN, Evidence, Plan, Read, State
from tests.control.plant import CELL, MATCH, PROMPT, TOKEN_BYTES

GOOD, BAD = 0.05, 0.9  # seconds of a read that pays, and of one that does not; recomputing takes 0.4


def read(begin: float, seconds: float, *, tagged: bool = False, rtt: float = 2e-4, waited: float = 0.0) -> Read:
    return Read(
        at=begin + seconds, seconds=seconds, prompt_tokens=PROMPT, local_tokens=0, loaded_tokens=MATCH,
        bytes=MATCH * TOKEN_BYTES, tagged=tagged, rtt=rtt, waited=waited,
    )  # fmt: skip


def step(state: State, now: float, *reads: Read, rtt: float = 2e-4, peers: float = float("-inf")) -> tuple[State, Plan]:
    evidence = Evidence(cells={"all": CELL}, rtt=rtt, reads=reads, mix={"2k-4k/c0-4": 2.0}, peers_healed=peers)
    return decide(state, evidence, now)


def test_a_try_that_began_before_rtt_fell_does_not_send_the_healed_link_back() -> None:
    trying = State(name=HALF_OPEN, since=98.0, reason="try", rtt=0.02, backoff=8.0)
    healed, _ = step(trying, 100.0)
    assert (healed.name, healed.reason, healed.since) == (HALF_OPEN, "healed", 100.0)
    state, _ = step(healed, 101.0, read(99.5, BAD, tagged=True, rtt=0.02))
    assert state.name == HALF_OPEN
    assert step(state, 102.0, read(101.5, GOOD, tagged=True))[0].name == OPEN


def test_a_bad_try_sends_back_where_rtt_has_not_fallen() -> None:
    trying = State(name=HALF_OPEN, since=98.0, reason="try", rtt=0.02, backoff=8.0)
    assert step(trying, 101.0, read(99.5, BAD, tagged=True, rtt=0.02), rtt=0.02)[0].name == BYPASS


def test_a_try_that_waited_for_steps_of_a_busy_engine_paid() -> None:
    """Seen in the lab: recomputing kept the engine busy, so no try ended in time, so everybody recomputed."""
    trying = State(name=HALF_OPEN, since=92.0, reason="healed", rtt=0.02)
    assert step(trying, 97.0, read(92.5, 4.2, tagged=True, waited=4.1))[0].name == OPEN
    assert step(trying, 97.0, read(92.5, 4.2, tagged=True, waited=1.0))[0].name == BYPASS


def test_a_try_that_may_have_waited_or_not_opens_nothing_where_rtt_has_not_fallen() -> None:
    trying = State(name=HALF_OPEN, since=80.0, reason="healed", rtt=2e-4, backoff=4.0)
    state, plan = step(trying, 97.0, *(read(at, 6.0, tagged=True, waited=6.0) for at in (81.0, 90.0)))
    assert (state.name, state.goods, plan.reads.trickle_seconds) == (HALF_OPEN, 0, 8.0)
    gap = plan.reads.trickle_seconds
    for now in (105.0, 130.0, 165.0):  # each may have lost 5.6 s of the six a minute
        state, plan = step(state, now, read(now - 6.0, 6.0, tagged=True, waited=6.0))
        gap = plan.reads.trickle_seconds
    assert (state.name, gap) == (HALF_OPEN, 30.0)
    assert step(state, 170.0, read(169.0, GOOD, tagged=True, waited=GOOD))[0].name == OPEN


def test_reads_that_may_have_waited_say_nothing_of_an_open_link() -> None:
    costs = costs_of(decide(State(), Evidence(cells={"all": CELL}, rtt=2e-4), 0.0)[1].coefficients)
    took = costs.read_seconds(MATCH * TOKEN_BYTES)
    slow = [read(90.0 + number / 4, took * 4.0) for number in range(3)]
    state, _ = step(State(name=OPEN, since=80.0), 91.0, *slow)
    assert state.pace == pytest.approx(4.0, rel=0.02)
    state, _ = step(state, 97.5, *(read(91.0 + number / 100, 6.0, waited=6.0) for number in range(10)))
    assert state.pace == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(("waited", "pace"), [(0.0, 10.0), (0.4, 2.0), (0.5, 1.0)])
def test_the_last_reads_count_by_what_they_took_for_sure(waited: float, pace: float) -> None:
    expected = read(0.0, 0.1)
    costs = decide(State(), Evidence(cells={"all": CELL}, rtt=2e-4), 0.0)[1].coefficients
    took = costs_of(costs).read_seconds(expected.bytes)
    reads = [read(90.0 + number, took * 10.0, waited=took * 20.0 * waited) for number in range(5)]
    state, _ = step(State(name=OPEN, since=80.0), 96.0, *reads)
    assert state.pace == pytest.approx(pace, rel=0.02)


def test_another_engine_that_reads_again_is_reason_to_try_at_once() -> None:
    stopped = State(name=BYPASS, since=90.0, reason="projected", backoff=30.0, rtt=2e-4)
    state, plan = step(stopped, 100.0, peers=99.0)
    assert (state.name, plan.reason) == (HALF_OPEN, "healed")
    assert step(stopped, 100.0, peers=80.0)[0].name == BYPASS  # that was before: this engine's own trouble


@pytest.mark.parametrize("at", [90.25, 91.5])
def test_what_was_stuck_and_ended_is_remembered_until_something_may_follow(at: float) -> None:
    stopped = State(name=BYPASS, since=90.0, reason="stalled", backoff=30.0, rtt=2e-4)
    state, _ = step(stopped, at, read(88.0, 2.1))
    if at < 91.0:
        assert state.name == BYPASS
        state, _ = step(state, 91.25)
    assert (state.name, state.reason) == (HALF_OPEN, "progress")
    assert step(stopped, 91.25)[0].name == BYPASS


def test_that_a_slow_read_has_ended_says_nothing_while_rtt_is_raised() -> None:
    stopped = State(name=BYPASS, since=90.0, reason="trickle", lost=0.5, backoff=30.0, rtt=0.02)
    state, _ = step(stopped, 91.5, read(88.0, 2.1, rtt=0.02), rtt=0.02)
    assert state.name == BYPASS
    assert step(state, 92.0, rtt=2e-4)[0].reason == "healed"


def test_a_try_that_found_too_little_to_pay_is_no_evidence_unless_it_was_slow() -> None:
    trying = State(name=HALF_OPEN, since=92.0, reason="try", rtt=2e-4)
    little = replace(read(92.5, 0.013, tagged=True), loaded_tokens=100, bytes=100 * TOKEN_BYTES)  # saves 0.01 s
    state, _ = step(trying, 93.0, little)
    assert (state.name, state.goods) == (HALF_OPEN, 0)
    assert step(trying, 93.0, replace(little, seconds=0.03))[0].name == BYPASS
    assert step(trying, 93.0, replace(little, ok=False))[0].name == BYPASS


def test_tries_that_tell_nothing_wait_for_one_another_as_bad_ones_do() -> None:
    """While hits stay small every try loses."""
    state = State(name=HALF_OPEN, since=92.0, reason="try", rtt=2e-4, backoff=2.0)
    little = replace(read(92.5, 0.013, tagged=True), loaded_tokens=100, bytes=100 * TOKEN_BYTES)
    state, plan = step(state, 93.0)
    gaps = [plan.reads.trickle_seconds]
    for now in (93.25, 98.0, 103.0):
        state, plan = step(state, now, replace(little, at=now - 0.1))
        assert state.name == HALF_OPEN
        gaps.append(plan.reads.trickle_seconds)
    assert gaps == [0.5, 4.0, 4.0, 4.0]
    assert step(state, 103.25)[1].reads.trickle_seconds == 4.0
    assert step(state, 104.0, peers=103.5)[1].reads.trickle_seconds == 0.5  # there is news: it is asked at once
    once, _ = step(state, 104.0, read(103.5, GOOD, tagged=True))
    assert step(once, 108.0, read(107.5, GOOD, tagged=True))[0].name == OPEN


def test_one_good_try_opens_once_another_engine_reads_again() -> None:
    trying = State(name=HALF_OPEN, since=92.0, reason="try", goods=1, rtt=2e-4)
    assert step(trying, 93.0)[0].name == HALF_OPEN
    assert step(trying, 93.0, peers=91.0)[0].name == HALF_OPEN  # that was before
    assert step(trying, 93.0, peers=92.5)[0].name == OPEN


def test_tries_of_many_engines_wait_for_a_permit() -> None:
    trying = State(name=HALF_OPEN, since=92.0, reason="try", rtt=2e-4)
    for part, gap in ((0, None), (1, 0.5), (None, 0.5)):
        _, plan = decide(trying, Evidence(cells={"all": CELL}, rtt=2e-4, max_inflight=part), 93.0)
        assert plan.reads.trickle_seconds == gap


def test_one_good_try_opens_once_what_was_stuck_has_ended() -> None:
    trying = State(name=HALF_OPEN, since=92.0, reason="try", rtt=2e-4)
    assert step(trying, 93.0, read(92.5, GOOD, tagged=True))[0].name == HALF_OPEN  # two are wanted
    moved, _ = step(trying, 92.5, read(88.0, 4.1))
    assert moved.reason == "progress"
    assert step(moved, 93.0, read(92.5, GOOD, tagged=True))[0].name == OPEN


def test_reads_that_began_before_the_link_healed_are_no_evidence_after() -> None:
    trying = State(name=HALF_OPEN, since=92.0, reason="healed", rtt=2e-4)
    opened, _ = step(trying, 93.0, read(92.5, GOOD, tagged=True))
    assert (opened.name, opened.fresh) == (OPEN, 92.0)
    late, _ = step(opened, 95.5, read(60.0, 35.0), read(61.0, 34.2))
    assert (late.name, late.pace) == (OPEN, 1.0)
    slow, _ = step(opened, 95.5, read(93.1, BAD), read(94.2, BAD))
    assert slow.pace == pytest.approx(BAD / 0.05, rel=0.2)
    kept = from_json(to_json(opened, 95.0), 195.0)
    assert kept.fresh == pytest.approx(192.0)


def after(reads: Sequence[Read]) -> tuple[State, Plan]:
    state, plan = step(State(since=0.0), 95.0, *reads)
    for tick in range(1, 10):
        state, plan = step(state, 95.0 + tick / 4.0)
    return state, plan


def test_a_slow_burst_keeps_others_out_and_asks_for_one_more_before_it_is_believed() -> None:
    calm = [read(90.0 + n / 2, GOOD) for n in range(4)]
    state, plan = after([*calm, read(94.0, BAD), read(94.1, BAD)])
    assert state.pace > 10.0  # what the gates reckon with
    assert state.name != BYPASS
    assert plan.reads.trickle_seconds == 0.5
    state, plan = after([*calm, read(93.0, BAD), read(94.1, BAD)])  # one after the other: that is no burst
    assert (state.name, state.reason) == (BYPASS, "projected")


def test_bursts_that_were_slow_are_not_believed_over_the_good_reads_since() -> None:
    slow = [read(90.0, BAD), read(91.0, BAD)]
    state, _ = after([*slow, *(read(91.95 + n / 100, GOOD) for n in range(5))])  # they overlap: one observation
    assert (state.name, state.reason, state.pace) == ("open", "", 1.0)


def test_models_too_young_to_know_the_part_by_size_refuse_nothing() -> None:
    assert CELL.fetch is not None
    dear = replace(CELL.fetch, t0=5.0)
    for n, refused in ((29, False), (30, True)):
        cell = replace(CELL, fetch=replace(dear, n=n))
        _, plan = decide(State(), Evidence(cells={"all": cell}, rtt=2e-4, mix={"2k-4k/c0-4": 2.0}), 10.0)
        assert bool(plan.coefficients.fetch) is refused
