"""What a hook saw itself: samples in, numbers out; every alarm beside what must not raise it."""

import math
import random

import pytest

from guard.costs import Costs
from guard.pace import BREAKER_NS, PERMIT_NS, Pace

SECOND = 10**9
COSTS = Costs({"seconds": 0.1, "spread": 0.05}, {"b": 1e-4})


def pace(costs: Costs = COSTS) -> Pace:
    made = Pace()
    made.learn(costs)
    return made


def read(one: Pace, start: float, seconds: float, *, key: int = 1, ok: bool = True, projected: float = 0.1) -> int:
    end = int((start + seconds) * SECOND)
    one.begin(key, int(start * SECOND), projected, 1000)
    one.end(key, end, ok=ok)
    return end


def test_two_slow_reads_count_in_full_and_one_by_half() -> None:
    one = pace()
    end = read(one, 0.0, 1.0)
    assert one.slowdown(end) == pytest.approx(10**0.5, rel=0.01)
    end = read(one, 1.0, 0.9)
    assert one.slowdown(end) == pytest.approx(9.0, rel=0.01)
    for start in (2.0, 2.2, 2.4, 2.6, 2.8, 3.0):
        end = read(one, start, 0.1)
    assert one.slowdown(end) == 1.0


def test_two_fast_reads_after_slow_ones_count_in_full_and_one_by_half() -> None:
    one = pace()
    read(one, 0.0, 1.0)
    read(one, 1.0, 1.0)
    end = read(one, 2.0, 0.1)
    assert one.slowdown(end) == pytest.approx(10 ** (0.5 * 2.71828**-0.02), rel=0.01)
    assert one.slowdown(read(one, 2.2, 0.1)) == 1.0


def test_slowness_fades_when_nothing_is_read() -> None:
    one = pace()
    read(one, 0.0, 1.0)
    end = read(one, 1.0, 1.0)
    assert one.slowdown(end + 5 * SECOND) == pytest.approx(10 ** (1 / 2.71828), rel=0.01)
    assert one.slowdown(end + 60 * SECOND) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_raises_nothing(seed: int) -> None:
    rng, one, at = random.Random(seed), pace(), 0.0
    for _ in range(5000):
        end = read(one, at, 0.1 * rng.lognormvariate(0.0, 0.05))
        at += 0.2
        assert one.slowdown(end) == 1.0
        assert one.overdue(end) == 0.0


def test_a_read_older_than_projected_is_overdue_until_a_later_one_ends_in_time() -> None:
    one = pace()
    one.begin(7, 0, 0.1, 500)
    assert one.overdue(int(0.12 * SECOND)) == 0.0
    assert one.overdue(SECOND) == pytest.approx(10.0)
    read(one, 1.0, 0.1, key=8)  # overtakes: 7 was aborted, or its worker died
    assert one.overdue(2 * SECOND) == 0.0
    assert one.oldest_age(2 * SECOND) == 0.0
    assert (one.inflight, one.inflight_bytes) == (1, 500)
    one.age_out(PERMIT_NS - 1)
    assert one.inflight == 1
    one.age_out(PERMIT_NS)
    assert (one.inflight, one.inflight_bytes) == (0, 0)


def test_a_lookup_that_may_find_much_is_late_only_when_much_would_be() -> None:
    one = pace()
    one.begin(7, 0, 0.1, 500, longest=0.4)
    assert one.overdue(int(0.5 * SECOND)) == 0.0
    assert one.overdue(int(0.6 * SECOND)) == pytest.approx(1.5)


def test_a_read_that_is_slow_itself_proves_nothing() -> None:
    one = pace()
    one.begin(7, 0, 0.1, 500)
    read(one, 1.0, 2.0, key=8)
    assert one.overdue(3 * SECOND) == pytest.approx(30.0)


def test_what_a_busy_engine_has_not_looked_at_is_not_overdue() -> None:
    """Two steps of 2 s each: a connector asks in one whether its read has ended, and hears in the next."""
    one = pace()
    one.begin(7, 0, 0.1, 500)
    one.step(int(0.01 * SECOND))
    one.step(2 * SECOND)
    assert one.overdue(4 * SECOND) == 0.0
    one.step(4 * SECOND)
    assert one.overdue(4 * SECOND) == pytest.approx(20.0)  # the second step heard of none


@pytest.mark.parametrize(("waited", "slowdown"), [(0.0, 40.0), (3.95, 1.0), (2.0, 20.0)])
def test_what_a_read_may_have_waited_for_the_engine_is_not_slow(waited: float, slowdown: float) -> None:
    one = pace()
    for key in (7, 8):
        one.begin(key, 0, 0.1, 500)
        one.end(key, 4 * SECOND, waited=int(waited * SECOND))
    assert one.slowdown(4 * SECOND) == pytest.approx(slowdown)


def test_reads_that_may_have_waited_all_their_time_are_no_evidence_either_way() -> None:
    one = pace()
    one.begin(7, 0, 0.1, 500)
    for key in (8, 9):
        one.begin(key, SECOND, 0.1, 500)
        one.end(key, 2 * SECOND)
    assert one.slowdown(2 * SECOND) == pytest.approx(10.0)
    for key in range(10, 50):
        one.begin(key, 2 * SECOND, 0.1, 500)
        one.end(key, 3 * SECOND, waited=SECOND)
    assert one.slowdown(3 * SECOND) == pytest.approx(10.0 ** math.exp(-1.0 / 5.0))  # it faded, no more
    assert one.proved == -1
    calm = pace()
    for key in range(40):
        calm.begin(key, 0, 0.1, 500)
        calm.end(key, 6 * SECOND, waited=6 * SECOND)
    assert (calm.slowdown(6 * SECOND), calm.proved) == (1.0, -1)
    calm.begin(50, 6 * SECOND, 0.1, 500)
    calm.end(50, 6 * SECOND + SECOND // 8, waited=SECOND // 8)
    assert calm.proved == 6 * SECOND  # in time even if it waited for nothing


def test_what_is_projected_by_nobody_is_not_overdue() -> None:
    one = Pace()
    one.begin(7, 0, 0.0, 500)
    assert one.overdue(50 * SECOND) == 0.0
    assert one.oldest_age(50 * SECOND) == 50.0


def test_failures_in_a_row_open_the_breaker_for_ten_seconds() -> None:
    one = pace()
    read(one, 0.0, 0.1, ok=False)
    read(one, 1.0, 0.1, ok=False)
    read(one, 2.0, 0.1)
    end = read(one, 3.0, 0.1, ok=False)
    assert not one.broken(end)
    read(one, 4.0, 0.1, ok=False)
    end = read(one, 5.0, 0.1, ok=False)
    assert one.broken(end)
    assert not one.broken(end + BREAKER_NS)
    read(one, 20.0, 0.1)
    assert not one.broken(21 * SECOND)


def test_new_coefficients_take_over_what_was_seen() -> None:
    one = pace()
    read(one, 0.0, 1.0)
    end = read(one, 1.0, 1.0)
    one.learn(COSTS)  # the same again: nothing is forgotten
    assert one.slowdown(end) == pytest.approx(10.0, rel=0.01)
    one.learn(Costs({"seconds": 0.5, "spread": 0.05}, {"b": 1e-4}))
    assert one.slowdown(end) == pytest.approx(2.0, rel=0.01)
    one.learn(Costs({"seconds": 1.0, "spread": 0.05}, {"b": 1e-4}))
    assert one.slowdown(end) == 1.0
    one.learn(None)
    assert one.slowdown(end) == 1.0


def test_a_trickle_waits_for_its_gap_and_for_the_one_under_way() -> None:
    one = pace()
    assert not one.trickle_due(0, None)
    assert one.trickle_due(0, 0.5)
    one.last_trickle = 0
    assert not one.trickle_due(SECOND // 4, 0.5)
    assert one.trickle_due(SECOND // 2, 0.5)
    one.begin(1, 0, 0.1, 1)
    assert not one.trickle_due(SECOND, 0.5)
    assert one.trickle_due(4 * SECOND, 0.5)


def test_reads_that_never_ended_or_were_never_begun_leak_nothing() -> None:
    one, rng = pace(), random.Random(1)
    for number in range(10_000):
        one.begin(number, number, 0.1, 10)
        kind = rng.randrange(4)
        if kind == 0:
            one.end(number, number + 1)
        elif kind == 1:
            one.forget(number)
        elif kind == 2:
            one.end(number + 10**6, number + 1)
        one.age_out(number)
    one.age_out(PERMIT_NS + 10_000)
    assert (one.inflight, one.inflight_bytes) == (0, 0)


def test_a_read_that_was_overtaken_loads_nothing_and_its_end_is_no_news() -> None:
    one = pace()
    one.begin(1, 0, 0.1, 1000)
    one.begin(2, 1 * SECOND, 0.1, 500)
    assert one.flight(20 * SECOND) == (2, 1500)  # both stuck: they may still load the link
    end = read(one, 20.0, 0.1, key=3)
    assert one.flight(end) == (0, 0)
    assert (one.inflight, one.overdue(end)) == (2, 0.0)
    one.end(1, 30 * SECOND)
    assert one.slowdown(30 * SECOND) == 1.0
    one.begin(4, 30 * SECOND, 0.1, 700)
    assert one.flight(30 * SECOND + 1) == (1, 700)


def test_one_that_is_slow_itself_overtakes_only_what_is_in_flight_for_far_longer() -> None:
    for waited, overdue in ((1.0, True), (10.0, False)):
        one = pace()
        one.begin(1, 0, 0.1, 1000)
        end = read(one, waited, 0.5, key=2)  # five times what is projected
        assert (one.overdue(end) > 0.0) is overdue
        assert one.slowdown(end) > 1.5  # that it was slow itself counts


def test_a_slow_read_of_a_moment_ago_counts_although_it_was_overtaken() -> None:
    one = pace()
    one.begin(1, 0, 0.1, 1000)
    read(one, 0.5, 0.1, key=2)
    one.end(1, 2 * SECOND)
    assert one.slowdown(2 * SECOND) > 2.0
