import math
import random
from typing import Any

import pytest

from guard.simulate.clock import Schedule
from guard.simulate.link import RTO, Link
from guard.simulate.reads import Lanes, Operation
from guard.simulate.scenario import parse


def link(**keys: Any) -> Link:
    spec = parse({"engine": {"count": 8}, "link": {"jitter": 0.0, "rtt": "1ms", "gbit": 8.0, **keys}}).link
    return Link(spec, random.Random(0))


def test_a_piece_is_round_trips_and_bytes_and_bytes_queue():
    one = link()
    assert one.piece(0.0, 0, 10, 1_000_000) == pytest.approx(0.010 + 0.001)  # 8 Gbit/s: 1 MB in 1 ms
    assert one.piece(0.0, 1, 0, 1_000_000) == pytest.approx(0.002)  # behind the first
    assert one.piece(1.0, 0, 1, 0) == pytest.approx(1.001)
    assert one.bytes == 2_000_000


def test_changes_hold_for_their_time_and_come_again():
    one = link(change=[{"at": 10, "for": 5, "every": 20, "rtt": "10ms"}])
    assert [one.condition(at, 0).rtt for at in (9.9, 10.0, 14.9, 15.0, 29.0, 30.0, 35.0)] == [
        0.001, pytest.approx(0.01), pytest.approx(0.01), 0.001, 0.001, pytest.approx(0.01), 0.001,
    ]  # fmt: skip


def test_a_ramp_moves_on_a_log_scale():
    one = link(change=[{"at": 0, "ramp": 10, "rtt": "100ms"}])
    assert one.condition(5.0, 0).rtt == pytest.approx(0.01)
    assert one.condition(10.0, 0).rtt == pytest.approx(0.1)


def test_a_change_of_one_engine_leaves_the_others_alone():
    one = link(change=[{"at": 0, "engines": [3], "bandwidth": 0.1, "loss": 1.0}])
    assert one.condition(1.0, 3).bandwidth == 0.1
    assert one.condition(1.0, 3).shared == 1.0
    assert one.condition(1.0, 2).loss == 0.0
    assert one.ready(1.0, 2) == 1.0
    assert one.ready(1.0, 3) == math.inf


def test_after_a_stall_the_next_retransmission_gets_through():
    one = link(change=[{"at": 1.0, "for": 2.0, "loss": 1.0}])
    assert one.ready(0.5, 0) == 0.5
    assert one.ready(1.0, 0) == pytest.approx(1.0 + RTO * (1 + 2 + 4 + 8))  # 0.2, 0.6, 1.4 are lost, 3.0 is not
    assert one.ready(2.9, 0) == pytest.approx(2.9 + RTO)


def test_lost_round_trips_cost_a_time_out_each():
    one = link(change=[{"at": 0.0, "loss": 0.5}])
    total = sum(one.piece(float(at), 0, 10, 0) - at for at in range(200))
    assert total / 200 == pytest.approx(0.010 + 5 * RTO, rel=0.1)


def ends(lanes: Lanes, schedule: Schedule, operations: list[tuple[float, float, int]]) -> list[tuple[float, bool]]:
    found: list[tuple[float, bool]] = []
    for at, trips, size in operations:
        one = Operation(0.0, trips, size, 8, lambda now, ok: found.append((round(now, 6), ok)))
        schedule.at(at, lambda now, each=one: lanes.start(now, each))
    schedule.run_until(1e6)
    return found


def test_operations_wait_for_a_lane():
    schedule = Schedule()
    lanes = Lanes(0, link(), schedule, readers=1, timeout=60.0)
    assert ends(lanes, schedule, [(0.0, 10, 0), (0.0, 10, 0)]) == [(0.01, True), (0.02, True)]


def test_operations_on_two_lanes_share_the_bandwidth():
    schedule = Schedule()
    lanes = Lanes(0, link(), schedule, readers=2, timeout=60.0)
    found = ends(lanes, schedule, [(0.0, 0, 8_000_000), (0.0, 0, 8_000_000)])
    assert found == [(pytest.approx(0.015), True), (pytest.approx(0.016), True)]


def test_round_trips_are_looked_at_again_between_pieces():
    schedule = Schedule()
    lanes = Lanes(0, link(change=[{"at": 0.004, "rtt": "100ms"}]), schedule, readers=1, timeout=60.0)
    assert ends(lanes, schedule, [(0.0, 8, 0)]) == [(pytest.approx(0.404), True)]  # four of 1 ms, four of 100 ms


def test_an_operation_gives_up_and_frees_its_lane():
    schedule = Schedule()
    lanes = Lanes(0, link(change=[{"at": 0.0, "for": 100.0, "loss": 1.0}]), schedule, readers=1, timeout=5.0)
    assert ends(lanes, schedule, [(0.0, 1, 0), (99.9, 1, 0)]) == [(5.0, False), (100.101, True)]


def test_reads_of_a_dead_worker_end_by_their_time_out_only():
    schedule = Schedule()
    lanes = Lanes(0, link(change=[{"at": 0.5, "hang": True}]), schedule, readers=2, timeout=5.0)
    assert ends(lanes, schedule, [(0.0, 1, 0), (1.0, 1, 0)]) == [(0.001, True), (6.0, False)]
