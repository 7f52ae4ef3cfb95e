"""From joined records to cells, events, metrics and the API: the service's own path."""

import random
from dataclasses import replace

import pytest

from guard import semconv as s
from guard.service import estimating as fits
from guard.service.estimating import Estimating
from guard.wire import FetchRecord, RequestRecord

MS = 1e-3


def record(number, rtt, *, hit=True, seed=0, simulated=False, backend="lmcache-mp/resp", trips=20):
    rng = random.Random(f"{seed}/{number}")
    noise = rng.lognormvariate(0.0, 0.05)
    tokens = rng.randrange(1024, 1536, 128)
    lookup = 2 * MS
    fetch = (10 * MS + trips * rtt) * noise if hit else 0.0
    computed = 1800 - (tokens if hit else 0)
    prefill = computed * 2e-4 * noise
    fetches = [
        FetchRecord(span_id=f"f{number}", attempt=1, start_ns=0, seconds=fetch, outcome="ok", bytes=tokens << 17,
                    inflight=1, network_rtt=rtt)
    ]  # fmt: skip
    return RequestRecord(
        internal_id=f"r{number}", request_id=f"c{number}", trace_id="t", span_id=f"s{number}", engine_id="e:1/0",
        model="m", backend=backend, class_="1k-2k/c0-4", arrival_ns=number * 10**8, prompt_tokens=1800, tokens_local=0,
        tokens_matched=tokens if hit else 0, tokens_loaded=tokens if hit else 0, tokens_computed=computed,
        ttft=lookup + fetch + prefill + MS, intake=MS, queue=0.0, lookup=lookup, slot=0.0, fetch=fetch, resume=0.0,
        prefill=prefill, residual=0.0, exposed_wait=fetch, decision="remote" if hit else "none",
        reason="on" if hit else "miss", running=2, simulated=simulated, fetches=fetches if hit else [], rtt=rtt,
    )  # fmt: skip


def feed(estimating, rtts, start=0, **more):
    for index, rtt in enumerate(rtts, start):
        estimating.add(record(index, rtt, hit=index % 4 != 0, **more))


@pytest.fixture
def events():
    return []


@pytest.fixture
def estimating(events, hands):
    return Estimating(events.append, hands.clock())


SWEEP = [rtt * MS for rtt in (0.2, 1.0, 3.0, 6.0, 12.0, 0.2) for _ in range(80)]


def test_rtt_that_crosses_departure_and_break_even_is_told_once(estimating, events):
    """20 round trips; saved about 1,216 tokens of 0.2 ms: break-even near (243 - 10) / 20 = 11 ms, departure 1 ms."""
    feed(estimating, SWEEP)
    estimating.settle(estimating.refit())
    pool, *_ = estimating.cells()
    assert pool.class_ == "all"
    assert pool.break_even.value == pytest.approx(11e-3, rel=0.15)
    assert pool.break_even.low < pool.break_even.value < pool.break_even.high
    assert pool.serial_round_trips.value == pytest.approx(20, rel=0.1)
    assert events == []
    feed(estimating, [14 * MS] * 30, start=1000)
    for _ in range(5):
        estimating.settle(estimating.refit())
    assert [event.kind for event in events if event.evidence["class"] == "all"] == [
        s.EVENT_DEPARTURE,
        s.EVENT_BREAK_EVEN,
    ]
    assert events[0].scope == "backend:lmcache-mp/resp"
    assert events[0].evidence["side"] == "above"
    feed(estimating, [0.2 * MS] * 30, start=2000)
    for _ in range(5):
        estimating.settle(estimating.refit())
    assert [event.evidence["side"] for event in events if event.evidence["class"] == "all"] == ["above"] * 2 + [
        "below"
    ] * 2


def test_one_look_crosses_nothing_and_noise_about_the_point_neither(estimating, events):
    feed(estimating, SWEEP)
    feed(estimating, [14 * MS] * 20, start=1000)
    cells = estimating.refit()
    for _ in range(2):
        estimating.settle(cells)
    assert events == []


def test_a_record_that_is_amended_counts_once(estimating):
    feed(estimating, SWEEP)
    feed(estimating, SWEEP)
    assert estimating.refit()[0].n == len(SWEEP)


def test_simulated_requests_count_only_where_there_are_no_real_ones(estimating):
    feed(estimating, SWEEP, simulated=True)
    assert estimating.refit()[0].n == len(SWEEP)
    assert estimating.simulated == {("m", "lmcache-mp/resp")}
    feed(estimating, SWEEP[:100], start=5000)
    assert estimating.refit()[0].n == 100
    assert not estimating.simulated


def test_gauges_name_every_point_with_its_source(estimating):
    feed(estimating, SWEEP)
    estimating.settle(estimating.refit())
    rows = {(metric.name, *labels): value for metric, labels, value in estimating.gauges()}
    key = ("m", "lmcache-mp/resp", "all")
    assert rows[s.INFLECTION_RTT.name, *key, "break-even", "value", "measured"] == pytest.approx(11e-3, rel=0.15)
    assert (s.VERDICT.name, *key, "state", "harmful") not in rows
    cell = estimating.cells()[0]
    assert rows[s.INFLECTION_RTT.name, *key, "now", "value", "measured"] == cell.rtt_now
    assert rows[s.INFLECTION_RTT.name, *key, "floor", "value", "measured"] == cell.rtt_floor
    assert (
        sum(
            value
            for name, value in rows.items()
            if name[0] == s.VERDICT.name and name[4] == "state" and name[3] == "all"
        )
        == 1.0
    )


def test_sides_of_cells_that_are_gone_are_forgotten(estimating):
    feed(estimating, SWEEP)
    cells = estimating.refit()
    for number in range(50):  # backends whose names never come back
        estimating.settle([replace(cell, backend=f"b{number}") for cell in cells])
    assert {key[1] for key in estimating._crossings} == {"b49"}


@pytest.mark.anyio
async def test_the_api_shows_cells_with_source_interval_and_n(runtime, client):
    feed(runtime.estimating, SWEEP)
    runtime.estimating.settle(runtime.estimating.refit())
    answer = (await client.get("/v1/inflection", params={"class": "all"})).json()
    (cell,) = answer["cells"]
    assert cell["backend"] == "lmcache-mp/resp"
    assert cell["break_even"]["source"] == "measured"
    assert cell["break_even"]["low"] < cell["break_even"]["high"]
    assert cell["break_even"]["n"] > 300
    assert cell["rtt"]["low"] == pytest.approx(0.2e-3)
    assert answer["priors"]["departure_rtt_seconds"] == 200e-6
    assert (await client.get("/v1/inflection", params={"backend": "other"})).json()["cells"] == []


@pytest.mark.anyio
async def test_without_rtt_variation_the_priors_stand_and_say_so(runtime, client):
    feed(runtime.estimating, [MS] * 200)
    runtime.estimating.settle(runtime.estimating.refit())
    (cell, *_) = (await client.get("/v1/inflection")).json()["cells"]
    assert (cell["departure"]["source"], cell["departure"]["value"]) == ("prior", 200e-6)
    assert cell["departure"]["reason"].startswith("insufficient-data: RTT did not vary")
    assert cell["seconds_per_token"]["value"] == pytest.approx(0.032 / 1216, rel=0.1)
    assert cell["verdict"]["shape"] == "insufficient-data"
    assert cell["verdict"]["state"] == "ok"


@pytest.mark.anyio
async def test_a_request_tells_what_the_other_road_would_have_cost(runtime, client):
    feed(runtime.estimating, SWEEP)
    runtime.estimating.settle(runtime.estimating.refit())
    slow = record(9001, 14 * MS)
    runtime.window.add(slow)
    (told,) = (await client.get("/v1/requests/c9001")).json()["requests"]
    assert told["other_road"]["choice"] == "recompute"
    assert told["other_road"]["ttft_seconds"]["value"] == pytest.approx(0.361, rel=0.1)
    assert told["other_road"]["ttft_seconds"]["source"] == "projected"
    assert any(words.startswith("recompute would have taken") for words in told["words"])


def test_records_that_wait_for_a_fit_are_bounded_and_what_makes_room_is_counted(events, hands, monkeypatch):
    monkeypatch.setattr(fits, "MAX_NEW", 10)
    estimating = Estimating(events.append, hands.clock())
    feed(estimating, [1 * MS] * 10)
    assert estimating.lost == 0
    feed(estimating, [1 * MS] * 7, start=10)
    assert estimating.lost == 7
    assert [record.span_id for record in estimating._new] == [f"s{number}" for number in range(7, 17)]  # the newest
    estimating.refit()
    feed(estimating, [1 * MS] * 10, start=17)  # there is room again
    assert estimating.lost == 7


async def test_what_the_estimates_lost_is_a_metric(runtime, client):
    assert "kvguard_estimate_lost_requests_total 0" in (await client.get("/metrics")).text
    runtime.estimating.lost = 3
    runtime.tick()
    assert "kvguard_estimate_lost_requests_total 3" in (await client.get("/metrics")).text
