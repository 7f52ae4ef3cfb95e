"""Cases from the field, in a closed loop with the real gate and the real pace (tests/control/plant.py).

Reads take 0.05 s on the good link and save 0.38 s. Every case that acts has a neighbour that must not.
"""

from dataclasses import replace

import pytest

from guard.control.shapes import State
from tests.control.plant import CELL, Link, World

GOOD = Link()


def bad(time: float) -> bool:
    return 20.0 <= time < 50.0


def into_bypass(world: World) -> list[float]:
    return [at for at, name, _ in world.states if name == "bypass"]


def test_a_good_link_is_used_and_a_share_is_held_out() -> None:
    world = World(lambda _: GOOD).run(60)
    assert {name for _, name, _ in world.states} == {"open"}
    reasons = [one.reason for one in world.requests if not one.remote]
    assert set(reasons) == {"holdout"}
    assert 0 < len(reasons) <= 0.05 * len(world.requests)


@pytest.mark.parametrize("seed", range(3))
def test_a19_noise_of_five_percent_trips_nothing_for_thirty_minutes(seed: int) -> None:
    world = World(lambda _: GOOD, noise=0.05, seed=seed, rate=2.0).run(1800)
    assert [name for _, name, _ in world.states] == ["open"]
    assert {one.reason for one in world.requests} <= {"no-directive", "auto", "holdout"}


@pytest.mark.parametrize("probed", [True, False])
def test_rtt_steps_up_and_back(probed: bool) -> None:
    world = World(lambda time: Link(rtt=0.02) if bad(time) else GOOD, probed=probed).run(80)
    # the first read of 0.7 s is late 0.07 s after it began: what begins a second later is no user's read
    assert world.untagged(21.1, 50.0) == []
    assert sum(one.remote for one in world.requests if 20 <= one.at < 21.1) <= 5
    assert any(one.remote and one.reason != "trickle" for one in world.requests if 50 <= one.at < 60)
    assert world.share(60, 80) > 0.95
    if probed:  # who measures RTT need not try
        assert len(into_bypass(world)) == 1
        assert [one for one in world.requests if bad(one.at) and one.at > 23 and one.remote] == []


def test_a5_a_tier_slower_than_recompute_is_left_after_the_first_few() -> None:
    """40 s hit, 0.9 s compute: here 100 times what is expected, and no probe says why."""
    world = World(lambda _: Link(bandwidth=0.002), probed=False).run(120)
    assert len([one for one in world.requests if one.remote and one.reason != "trickle"]) <= 5
    tries = [one for one in world.requests if one.remote and one.reason == "trickle"]
    assert len(tries) <= 8  # the budget of lost seconds: the last ones 30 s apart


def test_a6_storage_slows_and_heals() -> None:
    world = World(lambda time: Link(bandwidth=0.05) if bad(time) else GOOD).run(80)
    assert world.untagged(21.1, 50.0) == []
    assert any(one.reason == "auto" for one in world.requests if 50 <= one.at < 60 and one.remote)
    assert world.share(61, 80) > 0.95


def test_a7_a_stalled_read_keeps_others_out_long_before_its_timeout() -> None:
    world = World(lambda time: Link(stuck_until=80.0) if 20 <= time < 80 else GOOD).run(120)
    assert len(world.untagged(20.0, 80.0)) <= 5
    assert world.untagged(21.0, 80.0) == []
    assert len([one for one in world.requests if 20 <= one.at < 80 and one.remote]) <= 12


def test_a8_a_tier_that_healed_is_used_again_within_sixty_seconds_even_if_nobody_probes() -> None:
    world = World(lambda time: Link(stuck_until=200.0) if 20 <= time < 200 else GOOD, probed=False).run(260)
    assert world.share(240, 260) > 0.95
    first = next(one.at for one in world.requests if one.at >= 200 and one.reason == "auto" and one.remote)
    assert first < 240


def test_a8_healing_that_probes_see_is_used_within_ten_seconds() -> None:
    dead = lambda time: 20 <= time < 200  # noqa: E731
    world = World(
        lambda time: Link(rtt=2.0, stuck_until=200.0) if dead(time) else GOOD, answers=lambda time: not dead(time)
    ).run(240)
    first = next(one.at for one in world.requests if one.at >= 200 and one.reason == "auto" and one.remote)
    assert first < 210
    assert len([one for one in world.requests if 23 < one.at < 200 and one.remote]) == 0


def test_a12_answered_probes_are_no_progress() -> None:
    """PING answers, loads never finish: progress decides."""
    world = World(lambda time: Link(stuck_until=1e6) if time >= 20 else GOOD, answers=lambda _: True).run(60)
    assert into_bypass(world)
    assert into_bypass(world)[0] < 23
    assert world.untagged(21.1, 60.0) == []


def test_failures_close_the_gate_and_one_failure_does_not() -> None:
    world = World(lambda time: replace(GOOD, fails=bad(time))).run(80)
    assert len(world.untagged(20.0, 50.0)) <= 5
    assert any(one.reason == "auto" and one.remote for one in world.requests if 50 <= one.at < 60)
    single = World(lambda time: replace(GOOD, fails=20.0 <= time < 20.2)).run(60)
    assert "bypass" not in {name for _, name, _ in single.states}


def test_flapping_reverses_once_per_real_change() -> None:
    world = World(lambda time: Link(rtt=0.02) if int(time / 30) % 2 else GOOD).run(240)
    assert len(into_bypass(world)) == 4
    assert [name for _, name, _ in world.states].count("half-open") == 3  # the last one is still bad
    for start in range(60, 240, 60):
        assert any(one.remote and one.reason == "auto" for one in world.requests if start <= one.at < start + 10)


@pytest.mark.parametrize("every", [40])
def test_short_stalls_cost_a_few_requests_each(every: int) -> None:
    def link(time: float) -> Link:
        start = time // every * every + 20
        return Link(stuck_until=start + 2) if start <= time < start + 2 else GOOD

    world = World(link).run(240)
    for start in range(20, 240, every):
        assert len(world.untagged(start, start + 2)) <= 5
        assert world.share(start + 10, start + 20) > 0.9


def test_no_models_and_a_good_link_change_nothing() -> None:
    world = World(lambda _: GOOD, cell=None).run(30)
    assert all(one.remote for one in world.requests)
    stuck = World(lambda time: replace(GOOD, fails=time >= 10), cell=None).run(30)
    assert "bypass" in {name for _, name, _ in stuck.states}


def test_models_of_a_handful_of_samples_do_not_close_a_link_that_is_near_break_even() -> None:
    fetch, prefill = CELL.fetch, CELL.prefill
    assert fetch is not None
    assert prefill is not None
    near = replace(CELL, fetch=replace(fetch, t0=0.38, kappa=0.0, n=4), prefill=replace(prefill, n=4))
    world = World(lambda _: GOOD, cell=near).run(20)
    assert "bypass" not in {name for _, name, _ in world.states}
    assert world.share(0, 20) > 0.9


def test_a_restart_in_mid_throttle_goes_on_where_it_was() -> None:
    first = World(lambda time: Link(rtt=0.02) if time >= 5 else GOOD).run(20)
    assert first.state.name == "bypass"
    from guard.control.memory import from_json, to_json

    restored = from_json(to_json(first.state, 20.0), 0.0, down=3.0)
    assert (restored.name, restored.reason, restored.sent) == ("bypass", first.state.reason, first.state.sent)
    again = World(lambda _: Link(rtt=0.02), state=restored).run(10)
    assert [name for _, name, _ in again.states] == ["bypass"]
    assert again.untagged(0.5, 10.0) == []


@pytest.mark.parametrize("kept", [None, {}, {"name": "ajar"}, {"name": "open"}, [], {"name": "bypass", "since": "x"}])
def test_what_was_kept_and_cannot_be_read_is_a_new_state(kept: object) -> None:
    from guard.control.memory import from_json

    assert from_json(kept, 0.0) == State()
