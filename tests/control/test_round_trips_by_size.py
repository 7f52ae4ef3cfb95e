"""Round trips that go with the size of a read reach the hooks as cost per byte."""

from dataclasses import replace

import pytest

from guard.control.projection import coefficients
from guard.control.shapes import Evidence
from guard.estimate.shapes import Cell, FetchModel, LookupModel, PrefillModel

CELL = Cell(
    model="m", backend="b", class_="all", n=900, rtt_now=2e-3, rtt_floor=2e-4, bytes_per_token=1e5,
    reference_tokens=2000.0, reference_matched=1000.0, prefill=PrefillModel(a=0.01, b=1e-4, n=900),
    fetch=FetchModel(t0=0.01, kappa=2.0, kappa_per_byte=1e-7, seconds_per_byte=1e-9, n=600),
    lookup=LookupModel(t0=0.002, kappa=1.0, kappa_per_byte=2e-7, hit_probability=0.6, expected_tokens=1000.0, n=900),
)  # fmt: skip


def numbers(cell):
    return coefficients(replace(EVIDENCE, cells={"all": cell})).fetch


EVIDENCE = Evidence(cells={"all": CELL}, objective=None, rtt=2e-3)


def test_cost_per_byte_holds_the_round_trips_at_the_rtt_of_now():
    fetch = numbers(CELL)
    assert fetch["seconds"] == pytest.approx(0.01 + 2.0 * 2e-3)
    assert fetch["per_byte"] == pytest.approx(1e-9 + 1e-7 * 2e-3)
    assert fetch["lookup_per_byte"] == pytest.approx(2e-7 * 2e-3)
    size = 1e8
    told = fetch["seconds"] + fetch["per_byte"] * size
    assert told == pytest.approx(CELL.fetch.seconds(2e-3, size), rel=1e-3)
