"""The projected cost of the road not taken."""

import random

import pytest

from guard.estimate.road import other_road

MS = 1e-3


@pytest.fixture(scope="module")
def cell(request_of, pool_of):
    """Reads of 10 ms + 20 round trips; prefill of 0.1 ms a token."""
    rng, records = random.Random(1), []
    for number in range(400):
        rtt = (0.5, 2.0, 8.0, 1.0)[number // 100] * MS
        noise = rng.lognormvariate(0.0, 0.03)
        tokens = rng.randrange(512, 1536, 128)
        if number % 3:
            records.append(
                request_of(
                    number, matched=tokens, lookup=2 * MS, fetch=(10 * MS + 20 * rtt) * noise, rtt=rtt,
                    prefill=(2000 - tokens) * 1e-4 * noise,
                )
            )  # fmt: skip
        else:
            records.append(request_of(number, lookup=2 * MS, rtt=rtt, prefill=0.2 * noise))
    return pool_of(records)


def test_a_read_could_have_been_recomputed(cell, request_of):
    told = other_road(request_of(1, matched=1024, lookup=2 * MS, fetch=0.5, prefill=0.0976, rtt=24 * MS), cell)
    assert told["choice"] == "recompute"
    assert told["ttft_seconds"]["value"] == pytest.approx(0.2, rel=0.05)
    assert told["ttft_seconds"]["low"] < 0.2 < told["ttft_seconds"]["high"]
    assert told["ttft_seconds"]["source"] == "projected"
    assert told["difference_seconds"] == pytest.approx(0.2 - 0.5996, abs=0.02)


def test_a_refused_read_could_have_been_read(cell, request_of):
    declined = request_of(2, matched=1024, loaded=0, lookup=2 * MS, prefill=0.2, rtt=2 * MS, decision="decline")
    told = other_road(declined, cell)
    assert told["choice"] == "remote"
    assert told["ttft_seconds"]["value"] == pytest.approx(0.002 + 0.05 + 0.0976, rel=0.06)
    skipped = other_road(request_of(3, prefill=0.2, rtt=2 * MS, decision="skip"), cell)
    assert skipped["assumed_matched_tokens"] == pytest.approx(cell.reference_matched)


def test_where_there_was_no_choice_there_is_no_number(cell, request_of):
    assert other_road(request_of(4, lookup=2 * MS), cell)["ttft_seconds"]["value"] is None
    assert other_road(request_of(5, matched=1024, fetch=0.1), None)["ttft_seconds"]["value"] is None
    assert other_road(request_of(6, matched=1024, fetch=0.1, ttft=None), cell)["choice"] == ""
