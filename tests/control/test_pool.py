"""One link, many engines: permits from the start, what lets them grow, and whom they go to. Single steps, no loop."""

from dataclasses import replace

import pytest

from guard.control.limit import baseline_after, fair_split, limit_after
from guard.control.memory import pool_from_json, pool_to_json
from guard.control.pool import IDLE_SECONDS, PROVED, TURN_SECONDS, Member, Pool, member, shared
from guard.control.projection import coefficients, costs_of, headroom
from guard.control.shapes import Evidence, Read
from tests.control.plant import CELL, MATCH, PROMPT, TOKEN_BYTES

SIXTEEN = {f"e{number}": Member(wants=True) for number in range(16)}
PLAIN = coefficients(Evidence(cells={"all": CELL}, rtt=2e-4))
assert PLAIN is not None
COSTS = costs_of(PLAIN)


def read(seconds: float, *, ok: bool = True) -> Read:
    return Read(
        at=10.0, seconds=seconds, prompt_tokens=PROMPT, local_tokens=0, loaded_tokens=MATCH, bytes=MATCH * TOKEN_BYTES,
        ok=ok,
    )  # fmt: skip


def test_headroom_is_the_reads_at_once_that_still_pay() -> None:
    assert CELL.fetch is not None
    # saved 0.384 s, fixed 0.0116 s, 0.0384 s of bytes each
    assert headroom(CELL) == pytest.approx((0.384 - 0.0116) / 0.0384, rel=0.001)
    thin = replace(CELL, fetch=replace(CELL.fetch, seconds_per_byte=1e-6))
    assert headroom(thin) == 1.0
    sends = replace(thin.lookup, sends_local=True, seconds_per_byte=1e-8) if thin.lookup else None
    local = replace(CELL, lookup=sends, reference_local=100.0, reference_matched=MATCH - 100.0)
    size = (MATCH - 100.0) * TOKEN_BYTES
    moving = 1e-8 * size + 1e-8 * MATCH * TOKEN_BYTES
    assert headroom(local) == pytest.approx((1e-4 * (MATCH - 100) - 0.0116) / moving, rel=0.001)
    for unknown in (None, replace(CELL, prefill=None), replace(CELL, fetch=replace(CELL.fetch, seconds_per_byte=0.0))):
        assert headroom(unknown) is None


def test_where_requests_wait_for_the_gpu_more_reads_at_once_pay() -> None:
    assert headroom(CELL, 2.0) == pytest.approx((3.0 * 0.384 - 0.0116) / 0.0384, rel=0.001)
    slow = read(0.9)  # saves 0.384 s to each
    for waiting, paid, lost in ((0.0, 0, 1), (1.3, 0, 1), (1.4, 1, 0)):
        told = member([slow], COSTS, 0, waiting=waiting)
        assert (told.paid, told.lost) == (paid, lost)


def test_a_first_burst_of_many_engines_is_bounded_from_the_start() -> None:
    pool, parts = shared(Pool(), SIXTEEN, 2.7, 0.0)
    assert sum(parts.values()) == 2
    assert set(parts.values()) == {0, 1}
    assert shared(Pool(), {"e0": Member(wants=True)}, 1.0, 0.0)[1] == {}  # an engine alone sees all of its link
    assert shared(pool, SIXTEEN, None, 0.0)[1] == {}  # nothing is guessed without a model


def test_permits_go_round_among_those_that_would_read_and_stay_with_those_that_do() -> None:
    got = {
        name for turn in range(8) for name, part in shared(Pool(), SIXTEEN, 2.0, turn * TURN_SECONDS)[1].items() if part
    }
    assert got == set(SIXTEEN)
    reading = SIXTEEN | {"e7": Member(inflight=1)}
    for turn in range(8):
        assert shared(Pool(), reading, 1.0, turn * TURN_SECONDS)[1]["e7"] == 1
    quiet = dict.fromkeys(SIXTEEN, Member())
    assert len({str(shared(Pool(), quiet, 2.0, turn * TURN_SECONDS)[1]) for turn in range(8)}) == 1
    stopped = dict.fromkeys(SIXTEEN, Member(wants=True, stopped=True)) | {"e3": Member()}
    assert shared(Pool(), stopped, 1.0, 0.0)[1]["e3"] == 1


def test_reads_that_pay_open_the_link_and_slow_ones_that_do_not_close_it() -> None:
    paying = SIXTEEN | {"e0": Member(paid=4, time=1.0)}
    pool, parts = shared(Pool(), paying, 1.0, 0.0)
    assert sum(parts.values()) == 5
    while pool.paid < PROVED * 16:
        pool, parts = shared(pool, paying, 1.0, 0.0)
    assert parts == {}
    losing = dict.fromkeys(SIXTEEN, Member(wants=True, lost=1, time=5.0))
    pool = replace(pool, paid=PROVED * 16.0, round=(0, 0))
    halved, parts = shared(pool, losing, 1.0, 0.0)
    assert (halved.paid, set(parts.values())) == (PROVED * 8.0, {2})
    stopped = dict.fromkeys(SIXTEEN, Member(stopped=True))
    assert shared(replace(pool, paid=2.0 * pool.paid), stopped, 1.0, 0.0)[0].paid == PROVED * 8.0
    pool = replace(pool, read_at=0.0)
    for seconds, left in ((IDLE_SECONDS - 1.0, 1.0), (IDLE_SECONDS + 1.0, 0.5), (2.0 * IDLE_SECONDS + 3.0, 0.25)):
        pool, _ = shared(pool, SIXTEEN, 1.0, seconds)
        assert pool.paid == left * PROVED * 16.0


@pytest.mark.parametrize(("paid", "reads"), [(0.0, 1), (2.0, 3), (9.0, 6), (48.0, 6)])
def test_losses_count_once_as_many_reads_have_ended_as_may_be_in_flight(paid: float, reads: int) -> None:
    """Of few engines a step sees one read: if a lost one were all of a step, a third would hold them back for ever."""
    six = {f"e{number}": Member(wants=True) for number in range(6)}
    pool, bad = Pool(paid=paid), six | {"e0": Member(wants=True, lost=1)}
    for _ in range(reads - 1):
        pool, _ = shared(pool, bad, 1.0, 0.0)
        assert pool.paid == paid
    assert shared(pool, bad, 1.0, 0.0)[0].paid == paid / 2.0
    good, parts = six | {"e0": Member(wants=True, paid=1)}, {}
    pool = Pool()
    for number in range(60):
        pool, parts = shared(pool, bad if number % 3 == 0 else good, 1.0, 0.0)
    assert pool.paid == pytest.approx(20.0, abs=3.0)
    assert sum(parts.values()) >= 12


def permitted(engines: int, lost: float) -> int:
    """Engines that may read after a minute of four steps a second, in which each with a permit reads once a second."""
    waiting = {f"e{number}": Member(wants=True) for number in range(engines)}
    pool, parts = shared(Pool(), waiting, 4.0, 0.0)
    due = 0.0
    for tick in range(1, 240):
        members = dict(waiting)
        for number in range(tick % 4, engines, 4):
            if not parts.get(f"e{number}", 1):
                continue
            due += lost
            bad, due = int(due >= 1.0), due % 1.0
            members[f"e{number}"] = Member(wants=True, inflight=1, time=1.0, paid=1 - bad, lost=bad)
        pool, parts = shared(pool, members, 4.0, tick / 4.0)
    return sum(part > 0 for part in parts.values()) if parts else engines


@pytest.mark.parametrize("engines", [16, 200, 1000])
def test_a_few_losses_throttle_a_large_fleet_no_more_than_a_small_one(engines: int) -> None:
    assert permitted(engines, 0.01) == engines


def test_a_fleet_whose_reads_do_not_pay_is_held_back() -> None:
    assert permitted(200, 0.9) < 20


def test_what_an_engine_tells_of_its_reads() -> None:
    good, slow_but_pays, loses = 0.05, 0.2, 0.9
    told = member([read(good), read(slow_but_pays), read(loses), read(9.0, ok=False)], COSTS, 3, wants=True)
    assert member([replace(read(loses), tagged=True)], COSTS, 0).lost == 0
    either = member([replace(read(6.0), waited=6.0)], COSTS, 0)  # it paid or did not: who knows
    assert (either.paid, either.lost) == (0, 0)
    after, _ = shared(Pool(paid=7.0, read_at=0.0), {"e0": either}, 1.0, IDLE_SECONDS + 1.0)
    assert after.paid == 7.0  # nor was the link idle
    assert (told.paid, told.lost, told.inflight, told.wants) == (2, 1, 3, True)
    assert told.time == pytest.approx((good + slow_but_pays + loses) / 3 / 0.05, rel=0.01)
    assert member([read(loses)], None, 0).paid == 1  # nobody can say


def test_a_link_that_slows_all_is_limited_and_left_alone_again_when_it_does_not() -> None:
    busy = {f"e{number}": Member(inflight=5, time=1.0, paid=1) for number in range(4)}
    pool = Pool(paid=100.0)
    for _ in range(3):
        pool, parts = shared(pool, busy, 3.0, 0.0)
    assert parts == {}
    slow = {name: replace(each, time=6.0) for name, each in busy.items()}
    for _ in range(4):
        pool, parts = shared(pool, slow, 3.0, 0.0)
    assert set(parts.values()) == {2}
    one = busy | {"e0": replace(busy["e0"], time=60.0)}
    assert shared(Pool(paid=100.0, baseline=1.0), one, 3.0, 0.0)[1] == {}  # one engine's trouble is its own
    for _ in range(20):
        pool, parts = shared(pool, slow, 3.0, 0.0)
    assert set(parts.values()) == {1}
    assert sum(shared(pool, slow, 9.0, 0.0)[1].values()) == 8  # nine at once would still pay
    calm = {name: replace(each, time=1.0, inflight=0) for name, each in busy.items()}
    for _ in range(200):
        pool, parts = shared(pool, calm, 3.0, 0.0)
    assert parts == {}  # although nobody seemed to need it


def test_a_limit_stays_where_few_reads_are_slow_and_grows_where_they_are_not() -> None:
    assert limit_after(8.0, 1.0, 5.0, 2) == 8.0
    assert limit_after(8.0, 1.0, 1.0, 2) == pytest.approx(8.0 + 0.3 * 8.0**0.5)
    assert limit_after(None, 1.0, 5.0, 3) is None
    assert limit_after(None, 1.0, 4.0, 8) == pytest.approx(8.0 - 0.3 * 4.0)
    assert baseline_after(1.0, 2.0, 1) == 1.01
    assert baseline_after(1.0, 2.0, 9) == 1.0
    assert fair_split(7, {"a": 0, "b": 1, "c": 9}) == {"a": 1, "b": 1, "c": 5}


def test_a_restart_keeps_what_the_pool_has_learned() -> None:
    pool = Pool(limit=7.0, baseline=1.1, paid=40.0, read_at=95.0)
    assert pool_from_json(pool_to_json(pool, 100.0), 500.0) == replace(pool, read_at=495.0)
    assert pool_from_json({"limit": "x"}, 1.0) == pool_from_json(None, 1.0) == Pool()
