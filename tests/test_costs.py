"""Projected costs: numbers worked out by hand, and the gate's short form against the full one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.costs import ClassCost, Costs, Traffic
from guard.errors import WireError

FETCH = {"seconds": 0.010, "per_byte": 1e-9, "per_inflight_byte": 2e-9, "lookup_seconds": 0.002}
PREFILL = {"a": 0.005, "b": 1e-4}
COSTS = Costs(FETCH, PREFILL, {"all": {"hit": 0.5, "tokens": 2000}}, {"ttft_seconds": 2.0, "percentile": 0.95})


def test_both_roads_of_an_idle_engine() -> None:
    one = COSTS.compare_load(4000, 0, 3000, 30e6)
    assert one.recompute == pytest.approx(0.005 + 0.4)
    assert one.remote == pytest.approx(0.010 + 0.030 + 0.005 + 0.1)
    assert (one.remote_price, one.recompute_price) == (one.remote, one.recompute)  # nobody waits, nobody pays
    assert one.verdict == ""


def test_a_read_runs_while_the_queue_moves_and_a_synchronous_one_does_not() -> None:
    busy = Traffic(backlog_tokens=10_000)  # one second of prefill
    one = COSTS.compare_load(4000, 0, 3000, 30e6, busy)
    assert one.remote == pytest.approx(1.0 + 0.105)
    assert one.recompute == pytest.approx(1.0 + 0.405)
    assert COSTS.compare_load(4000, 0, 3000, 30e6, busy, sync=True).remote == pytest.approx(1.0 + 0.040 + 0.105)


def test_each_road_pays_for_those_it_holds_up() -> None:
    waiting = COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(waiting=3))
    assert waiting.recompute_price - waiting.recompute == pytest.approx(3 * 0.405)
    assert waiting.remote_price - waiting.remote == pytest.approx(3 * 0.105)
    sharing = COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(inflight=2))
    assert sharing.remote_price - sharing.remote == pytest.approx(2 * 0.030)
    everybody = COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(running=4, waiting=1), sync=True)
    assert everybody.remote_price - everybody.remote == pytest.approx(5 * 0.040 + 0.105)


def test_what_is_in_flight_makes_a_read_longer_until_recomputing_is_better() -> None:
    verdicts = [
        COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(inflight=n, inflight_bytes=n * 30_000_000)).verdict
        for n in range(6)
    ]
    # saved 0.3 s; the read takes 0.04 + n * (0.06 own + 0.03 of others)
    assert verdicts == ["", "", "", "projected", "projected", "projected"]


def test_the_road_that_meets_the_bound_wins_and_without_one_the_cheaper() -> None:
    wide = Costs({**FETCH, "seconds": 0.2, "spread": 1.0}, PREFILL, None, {"ttft_seconds": 0.5, "percentile": 0.95})
    one = wide.compare_load(4000, 0, 3900, 0)
    assert one.remote < one.recompute
    assert one.remote_tail > 0.5 >= one.recompute_tail
    assert one.verdict == "sla"
    # nobody can meet it: the cheaper one
    assert wide.compare_load(4000, 0, 3900, 0, Traffic(elapsed=1.0)).verdict == ""
    assert wide.compare_load(4000, 0, 3900, 0, bound=math.inf).verdict == ""


def test_before_the_lookup_a_miss_counts_with_its_probability() -> None:
    sure, never = ClassCost(1.0, 3000, 9.0), ClassCost(0.0, 3000, 9.0)
    size = 10_000.0
    assert COSTS.compare_lookup(4000, 0, sure, size).remote == pytest.approx(0.002 + 0.04 + 0.105)
    assert COSTS.compare_lookup(4000, 0, never, size).remote == pytest.approx(0.405 + 0.002)
    assert COSTS.compare_lookup(4000, 0, never, size).verdict == "projected"
    blocked = COSTS.compare_lookup(4000, 0, sure, size, Traffic(running=10), blocks=True)
    assert blocked.remote_price - blocked.remote == pytest.approx(10 * 0.002)


def test_what_is_held_here_and_there_tells_the_match_from_what_is_held_here() -> None:
    size = 10_000.0
    turns = ClassCost(1.0, 3000, 9.0, held=3500, prompt=4000, per_token=1.0)  # a conversation lacks its last turn
    shared = ClassCost(1.0, 3000, 9.0, held=3500, prompt=4000)  # a prefix as long in every prompt
    for expected, prompt, local, matched in (
        (turns, 4000, 0, 3500), (turns, 6000, 0, 5500), (turns, 6000, 5000, 500), (turns, 4000, 3800, 0),
        (turns, 6000, None, 3000), (shared, 6000, 0, 3500), (shared, 6000, 3000, 500), (shared, 3000, 1000, 1999),
    ):  # fmt: skip
        told = COSTS.compare_lookup(prompt, local, expected, size)
        left = prompt - (local or 0) - matched
        read = 0.002 + 0.01 + 1e-9 * matched * size
        assert told.remote == pytest.approx(read + 0.005 + 1e-4 * left), (expected, prompt, local)


def test_a_lookup_that_is_sent_what_vllm_holds_pays_for_it_hit_or_miss() -> None:
    sends = Costs({**FETCH, "lookup_per_byte": 1e-9, "lookup_per_local_byte": 1e-9}, PREFILL)
    sure, never = ClassCost(1.0, 1000, 9.0), ClassCost(0.0, 1000, 9.0)
    assert sends.compare_lookup(4000, 2000, sure, 10_000.0).remote == pytest.approx(0.012 + 0.04 + 0.105)
    assert sends.compare_lookup(4000, 2000, never, 10_000.0).remote == pytest.approx(0.205 + 0.002 + 0.02)


def test_what_the_hook_saw_itself_counts() -> None:
    slow = COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(slowdown=10.0))
    assert slow.remote == pytest.approx(0.4 + 0.105)
    assert slow.verdict == "projected"
    stuck = COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(overdue=7.6))
    assert stuck.verdict == "projected"
    assert COSTS.compare_load(4000, 0, 3000, 30e6, Traffic(overdue=7.4)).verdict == ""


def test_models_of_few_samples_refuse_only_beyond_their_doubt() -> None:
    doubtful = Costs({**FETCH, "seconds": 0.36, "doubt": 1.5}, PREFILL)
    assert doubtful.compare_load(4000, 0, 3000, 0).verdict == ""  # 0.465 against 0.405
    assert Costs({**FETCH, "seconds": 0.36}, PREFILL).compare_load(4000, 0, 3000, 0).verdict == "projected"
    assert Costs({**FETCH, "seconds": 0.6, "doubt": 1.5}, PREFILL).compare_load(4000, 0, 3000, 0).verdict == "projected"


TRAFFIC = st.builds(
    Traffic, st.integers(0, 50), st.integers(0, 10**10), st.integers(0, 200), st.integers(0, 200),
    st.integers(0, 10**6), st.floats(0, 5), st.floats(1, 100), st.floats(0, 60),
)  # fmt: skip


@given(
    prompt=st.integers(1, 100_000), share=st.floats(0, 1), hit=st.floats(0, 1), at=TRAFFIC, sync=st.booleans(),
    blocks=st.booleans(), bound=st.floats(0.01, 10),
)  # fmt: skip
def test_the_gate_decides_as_the_comparison_says(prompt, share, hit, at, sync, blocks, bound) -> None:
    matched = int(prompt * share)
    full = COSTS.compare_load(prompt, 0, matched, matched * 100.0, at, sync=sync, bound=bound)
    assert COSTS.loses_load(prompt, 0, matched, matched * 100.0, at, sync, bound) == full.verdict
    expected = ClassCost(hit, matched, bound)
    asked = COSTS.compare_lookup(prompt, 0, expected, 100.0, at, sync=sync, blocks=blocks)
    assert COSTS.loses_lookup(prompt, 0, expected, 100.0, at, sync, blocks) == asked.verdict
    assert all(map(math.isfinite, (*full[:6], *asked[:6])))


@pytest.mark.parametrize(
    ("fetch", "prefill", "sla", "says"),
    [
        ({"seconds": -1.0}, PREFILL, {}, "fetch.seconds"),
        ({"seconds": math.nan}, PREFILL, {}, "fetch.seconds"),
        ({"seconds": "1"}, PREFILL, {}, "fetch.seconds"),
        (FETCH, {"b": math.inf}, {}, "prefill.b"),
        (FETCH, {"b": 10**400}, {}, "prefill.b"),  # JSON can say it, a float cannot hold it
        (FETCH, PREFILL, {"percentile": 1.0}, "sla.percentile"),
        (FETCH, PREFILL, {"ttft_seconds": True}, "sla.ttft_seconds"),
    ],
)
def test_a_coefficient_that_cannot_be_used_is_named(fetch, prefill, sla, says) -> None:
    with pytest.raises(WireError, match=says):
        Costs(fetch, prefill, {}, sla)
    with pytest.raises(WireError, match=r"classes\.c"):
        Costs(FETCH, PREFILL, {"c": 1})
