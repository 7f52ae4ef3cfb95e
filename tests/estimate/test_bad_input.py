"""Input that tells nothing, or wrongly: a stated verdict, never an exception or a number that is not there."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guard.correlate.frame import frame
from guard.estimate.cell import estimate
from guard.estimate.frames import fit
from guard.estimate.samples import COLUMNS, Ring, Samples, clean, row_of

MS = 1e-3


@pytest.fixture(scope="module")
def traffic(request_of):
    """RTT in plateaus of 0.5 to 8 ms; 20 round trips; hits and misses."""

    def make(n=400, seed=1, **more):
        rng, records = random.Random(seed), []
        for number in range(n):
            rtt = (0.5, 2.0, 8.0, 1.0)[number * 4 // n] * MS
            noise = rng.lognormvariate(0.0, 0.05)
            if number % 3:
                one = request_of(
                    number,
                    matched=1024,
                    lookup=2 * MS,
                    fetch=(10 * MS + 20 * rtt) * noise,
                    rtt=rtt,
                    prefill=0.1 * noise,
                )
            else:
                one = request_of(number, lookup=2 * MS, prefill=0.2 * noise, rtt=rtt)
            records.append(replace(one, **more) if more else one)
        return records

    return make


def figures(cell):
    return (cell.departure, cell.break_even, cell.knee, cell.serial_round_trips)


def test_the_traffic_itself_has_an_answer(traffic, pool_of):
    cell = pool_of(traffic())
    assert cell.serial_round_trips.value == pytest.approx(20, rel=0.1)
    assert cell.departure.source == "measured"


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_hardly_any_samples(request_of, n):
    records = [request_of(i, matched=1024, lookup=MS, fetch=0.02, rtt=(1 + i) * MS) for i in range(n)]
    for cell in fit(frame(records)):
        assert cell.verdict.state == "insufficient-data"
        assert f"{n} of 4 reads" in cell.verdict.reason
        assert cell.departure.source == cell.break_even.source == "prior"


def test_constant_rtt(traffic, pool_of):
    cell = pool_of(traffic(rtt=MS))
    assert all(figure.value is None or figure.source == "prior" for figure in figures(cell))
    assert all("RTT did not vary" in figure.reason for figure in figures(cell))
    assert cell.seconds_per_token.value > 0.0


def test_no_rtt_at_all(traffic, pool_of):
    cell = pool_of(traffic(rtt=None))
    assert all("no RTT is known" in figure.reason for figure in figures(cell))
    assert cell.rtt_now is None


def test_all_hits_leave_open_what_a_hit_saves(traffic, pool_of):
    cell = pool_of([record for record in traffic() if record.tokens_loaded])
    assert cell.break_even.source == "prior"
    assert "computed in full" in cell.break_even.reason
    assert cell.net_cost.value is None
    assert cell.departure.source == "measured"


def test_all_misses(traffic, pool_of):
    cell = pool_of([record for record in traffic() if not record.tokens_loaded])
    assert cell.verdict.state == "insufficient-data"
    assert "none of" in cell.verdict.reason
    assert cell.lookup_cost.value == pytest.approx(2 * MS)
    assert cell.departure.source == "prior"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["fetch", "ttft", "prefill", "lookup", "rtt"])
def test_a_time_that_is_no_time_is_left_out(traffic, pool_of, field, value):
    good = traffic()
    bad = [
        replace(record, span_id=f"x{n}", internal_id=f"x{n}", **{field: value}) for n, record in enumerate(good[::7])
    ]
    before, after = pool_of(good), pool_of(good + bad)
    assert after.serial_round_trips.value == pytest.approx(before.serial_round_trips.value, rel=0.05)
    assert all(row_of(record) is None for record in bad) or field == "rtt"
    if field == "rtt":
        assert all(math.isnan(row_of(record)[COLUMNS.index("rtt")]) for record in bad)


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0, 3.0e8])
def test_a_clock_that_steps_changes_nothing(traffic, pool_of, step):
    records = traffic()
    stepped = [
        replace(record, arrival_ns=record.arrival_ns + int((n >= 200) * step * 1e9)) for n, record in enumerate(records)
    ]
    before, after = pool_of(records), pool_of(stepped)
    assert after.n == before.n
    assert after.serial_round_trips.value == pytest.approx(before.serial_round_trips.value, rel=0.02)
    assert after.break_even.value == pytest.approx(before.break_even.value, rel=0.02)


def test_duplicates_count_once_and_late_records_count(traffic, pool_of):
    records = traffic()
    assert pool_of(records + records[::2]) == pool_of(records[1::2] + records[::2]) or (
        pool_of(records + records[::2]).n == len(records)
    )
    late = records[50:] + records[:50]
    assert pool_of(late).serial_round_trips.value == pytest.approx(20, rel=0.1)


def test_an_engine_that_starts_again_counts_its_ids_from_the_beginning(traffic, pool_of):
    first = traffic()
    again = [
        replace(record, arrival_ns=record.arrival_ns + 10**12, span_id=f"z{n}")
        for n, record in enumerate(traffic(seed=2))
    ]
    assert pool_of(first + again).n == 800


def test_simulated_aborted_and_handed_off_requests_are_left_out(traffic, pool_of):
    good = traffic()
    for more in ({"simulated": True}, {"aborted": True}, {"handoff": True}, {"ttft": None}):
        strange = [
            replace(record, span_id=f"y{n}", internal_id=f"y{n}", fetch=9.0, **more) for n, record in enumerate(good)
        ]
        assert pool_of(good + strange) == pool_of(good)


def test_synchronous_loads_of_one_batch_are_one_load(request_of, pool_of):
    """Three requests wait for the same 30 ms of one step: 3,072 tokens took them, not 1,024."""
    records = []
    for step in range(120):
        rtt = (0.5, 2.0, 8.0)[step // 40] * MS
        members = 1 + step % 3
        records += [
            request_of(step * 3 + member, matched=1024, lookup=MS, fetch=members * (5 * MS + 4 * rtt), rtt=rtt, at=step,
                       batch=f"batch-{step}")
            for member in range(members)
        ]  # fmt: skip
    cell = pool_of(records)
    size = 1024 * 131072
    for rtt in (0.5 * MS, 8 * MS):
        assert cell.fetch.seconds(rtt, size) == pytest.approx(5 * MS + 4 * rtt, rel=0.05)
        assert cell.fetch.seconds(rtt, 3 * size) == pytest.approx(3 * (5 * MS + 4 * rtt), rel=0.05)


def test_old_samples_fade(request_of, pool_of):
    """An hour ago every read took 100 ms more."""
    records = [request_of(n, matched=1024, lookup=MS, fetch=0.15, rtt=MS, at=n * 10) for n in range(360)]
    records += [request_of(1000 + n, matched=1024, lookup=MS, fetch=0.05, rtt=MS, at=3600 + n * 10) for n in range(360)]
    recent = pool_of(records).remote_now.value
    assert recent < pool_of(records, half_life=1e9).remote_now.value
    assert recent < 0.07


def test_a_store_that_slows_down_is_seen_by_the_last_eight_reads(request_of, pool_of):
    rng = random.Random(5)
    good = [
        request_of(n, matched=1024, lookup=2 * MS, fetch=30 * MS * rng.lognormvariate(0.0, 0.1), rtt=MS)
        if n % 3
        else request_of(n, lookup=2 * MS, prefill=0.2, rtt=MS)
        for n in range(400)
    ]
    slow = [
        replace(
            one,
            span_id=f"w{n}",
            internal_id=f"w{n}",
            fetch=one.fetch * 6,
            ttft=one.ttft + 5 * one.fetch,
            arrival_ns=(500 + n) * 10**9,
        )
        for n, one in enumerate(good[:12])
    ]
    before, after = pool_of(good), pool_of(good + slow)
    assert before.verdict.state == "ok"
    assert after.remote_now.value > 3.0 * before.remote_now.value
    assert after.verdict.state == "harmful"


def test_a_thin_class_stands_on_the_pool(traffic):
    records = traffic() + [
        replace(one, span_id=f"t{n}", internal_id=f"t{n}", class_="thin") for n, one in enumerate(traffic()[:20])
    ]
    pool, full, thin = fit(frame(records))
    assert (pool.class_, full.class_, thin.class_) == ("all", "k", "thin")
    assert (full.pooled, thin.pooled, thin.n) == (False, True, 20)
    assert thin.fetch == pool.fetch


def test_the_ring_holds_the_last_rows_and_replaces_amended_ones(request_of):
    ring = Ring(capacity=100)
    rows = [row_of(request_of(n, matched=1024, lookup=MS, fetch=0.02 + n * 1e-6, rtt=MS)) for n in range(250)]
    for row in rows[:90]:
        ring.extend([row])
    ring.extend(rows[90:])
    held = ring.samples()
    assert len(held) == 100
    assert held["fetch"].tolist() == pytest.approx([0.02 + n * 1e-6 for n in range(150, 250)])
    assert np.all(np.diff(held["at"]) == 1.0)
    ring.extend([(*rows[200][:16], 9.0, *rows[200][17:])])
    assert len(ring.samples()) == 100
    assert np.all(np.diff(ring.samples()["at"]) == 1.0)
    assert ring.samples()["fetch"].max() == 9.0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 120), st.integers(0, 2**32 - 1), st.sampled_from(["zeros", "nan", "huge", "mixed"]))
def test_no_numbers_whatever_make_it_fail(n, seed, kind):
    rng = np.random.default_rng(seed)
    data = np.abs(rng.standard_cauchy((len(COLUMNS), n)))
    data[COLUMNS.index("at")] = np.arange(n)
    data[COLUMNS.index("road")] = rng.integers(0, 5, n)
    data[COLUMNS.index("engine")] = rng.integers(0, 3, n)
    if kind == "zeros":
        data *= rng.random((len(COLUMNS), n)) < 0.5
    elif kind == "nan":
        data[rng.random((len(COLUMNS), n)) < 0.1] = np.nan
    elif kind == "huge":
        data *= 10.0 ** rng.integers(-9, 9, (len(COLUMNS), 1))
    data[COLUMNS.index("at")] = np.arange(n)
    with np.errstate(all="ignore"):
        cell, _ = estimate("m", "b", "c", clean(Samples(data)))
    assert cell.verdict.reason or cell.n == 0
    for figure in figures(cell):
        for value in (figure.value, figure.low, figure.high):
            assert value is None or math.isfinite(value)
