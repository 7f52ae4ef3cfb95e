import copy
import dataclasses

import pytest

from guard import semconv as s
from guard.correlate.frame import SCHEMA, frame
from guard.correlate.join import Joiner
from guard.correlate.window import Window

SECOND = 10**9


@pytest.fixture
def record(spans):
    def make(number=1, start=0.0, **more):
        joiner = Joiner()
        joiner.add({}, spans.one(number, start, **more), 0)
        return joiner.advance(0)[0]

    return make


def test_requests_are_found_by_every_id(record):
    window = Window()
    children = [record(1, internal=f"{index}_cmpl-1-0000000{index}") for index in range(2)]
    other = record(2)
    for one in (*children, other):
        window.add(one, 0)
    assert window.find("cmpl-1") == children
    assert window.find("1_cmpl-1-00000001") == [children[1]]
    assert window.find("a" * 32) == [*children, other]
    assert window.find("nothing") == []
    assert window.find("") == []


def test_the_oldest_drops_off_by_number_and_by_age(record):
    window = Window(max_records=3, max_seconds=60.0)
    records = [record(number) for number in range(5)]
    for at, one in enumerate(records):
        window.add(one, at * SECOND)
    assert list(window) == records[2:]
    assert window.find("cmpl-1") == []
    window.expire(62 * SECOND)
    assert list(window) == records[2:]
    window.expire(63 * SECOND + 1)
    assert list(window) == records[4:]
    window.expire(1000 * SECOND)
    assert len(window) == 0
    assert not window._by_id


def test_amend_replaces_what_is_still_there(record):
    window = Window(max_records=2)
    one, two, three = (record(number) for number in range(3))
    for item in (one, two):
        window.add(item, 0)
    changed = dataclasses.replace(two, tpot=0.5, request_id="renamed")
    assert window.amend(changed)
    assert list(window) == [one, changed]
    assert window.find("renamed") == [changed]
    assert window.find("cmpl-1") == []
    window.add(three, 0)
    assert not window.amend(copy.copy(one))
    assert list(window) == [changed, three]


def test_adding_twice_keeps_one(record):
    window, one = Window(), record()
    window.add(one, 0)
    window.add(copy.copy(one), 5)
    assert len(window) == 1


def test_filters(record):
    window = Window()
    small, large = (
        record(1, **{s.INPUT_TOKENS: 100}),
        record(2, start=5.0, **{s.BACKEND: "other", s.REQUEST_MODEL: "b"}),
    )
    for one in (small, large):
        window.add(one)
    assert list(window.select()) == [small, large]
    assert list(window.select(model="b")) == [large]
    assert list(window.select(engine="host:8000/0")) == [small, large]
    assert list(window.select(engine="host:8000/1")) == []
    assert list(window.select(backend="lmcache-mp/resp")) == [small]
    assert list(window.select(class_="0-512/c0-4")) == [small]
    assert list(window.select(since_ns=large.arrival_ns, model="b")) == [large]


def test_frame_holds_the_records_and_sums_over_their_fetches(record):
    window = Window()
    assert frame(window).shape == (0, len(SCHEMA))
    one = record(1, attempts=2, reads=3)
    aborted = record(2, **{s.TTFT: None, s.ABORTED: True})
    for item in (one, aborted):
        window.add(item)
    rows = frame(window).to_dicts()
    assert rows[0]["class"] == "1k-2k/c0-4"
    assert rows[0]["miss_latency"] == pytest.approx(0.17)
    assert (rows[0]["attempts"], rows[0]["failed"], rows[0]["reads"], rows[0]["fetch_bytes"]) == (2, 1, 6, 4 << 20)
    for name in (
        set(SCHEMA)
        - {"class", "attempts", "failed", "reads", "fetch_bytes", "round_trips", "inflight"}
        - {"batch", "clamped"}
    ):
        assert [row[name] for row in rows] == [getattr(one, name), getattr(aborted, name)]
    assert frame(window.select(since_ns=one.arrival_ns + 1)).height == 0
