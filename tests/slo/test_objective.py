"""Objectives: which one holds, what is refused and how it is named."""

import math

import pytest

from guard.slo.burnrate import Tally, standing
from guard.slo.objective import Objective, ObjectiveError, Objectives, parse

GOOD = {"model": "m", "class": "1k-2k/c0-4", "ttft_seconds": 1.0, "percentile": 0.99, "tpot_seconds": 0.05}


def test_the_narrowest_objective_holds() -> None:
    items = parse(
        [{"ttft_seconds": 5}, {"model": "m", "ttft_seconds": 2}, GOOD, {"class": "1k-2k/c0-4", "ttft_seconds": 3}]
    )
    found = [items.find(*key) for key in (("m", "1k-2k/c0-4"), ("m", "2k-4k/c0-4"), ("x", "1k-2k/c0-4"), ("x", "*"))]
    assert [item.ttft_seconds for item in found if item] == [1.0, 2.0, 3.0, 5.0]
    general, classes = items.for_model("m")
    assert general is not None
    assert (general.ttft_seconds, {name: item.ttft_seconds for name, item in classes.items()}) == (
        2.0, {"1k-2k/c0-4": 1.0},
    )  # fmt: skip
    assert Objectives().find("m") is None


def test_objectives_come_back_as_they_were_written() -> None:
    assert parse([item.to_json() for item in parse([GOOD]).items]).items == parse([GOOD]).items


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ({}, r"^objectives: not a list"),
        (["x"], r"^objectives\[0\]: not a table"),
        ([{}], r"^objectives\[0\]\.ttft_seconds: missing"),
        ([{"ttft_seconds": 0}], r"^objectives\[0\]\.ttft_seconds: 0 is not a number above 0"),
        ([{"ttft_seconds": float("nan")}], r"^objectives\[0\]\.ttft_seconds"),
        ([{"ttft_seconds": True}], r"^objectives\[0\]\.ttft_seconds"),
        ([GOOD, {"ttft_seconds": 1, "percentile": 95}], r"^objectives\[1\]\.percentile: .* write 0\.95 for 95 %"),
        ([{"ttft_seconds": 1, "percentile": 1.0}], r"^objectives\[0\]\.percentile"),
        ([{"ttft_seconds": 1, "class": "huge"}], r"^objectives\[0\]\.class: 'huge' is not a class"),
        ([{"ttft_seconds": 1, "modell": "m"}], r"^objectives\[0\]\.modell: unknown key; known are model"),
        ([{"ttft_seconds": 1, "tpot_seconds": -1}], r"^objectives\[0\]\.tpot_seconds"),
        ([{"ttft_seconds": 1}, {"ttft_seconds": 2}], r"^objectives\[1\]: a second objective for model '\*'"),
    ],
)
def test_a_contradiction_or_nonsense_is_refused_by_its_key(items: object, says: str) -> None:
    with pytest.raises(ObjectiveError, match=says):
        parse(items)


def test_a_request_meets_its_objective_by_ttft_and_where_known_tpot() -> None:
    both = Objective(ttft_seconds=1.0, tpot_seconds=0.05)
    assert both.met(1.0, None)
    assert both.met(1.0, 0.05)
    assert not both.met(1.01, 0.01)
    assert not both.met(0.5, 0.06)


def test_burn_rate_and_goodput_from_counts() -> None:
    objective = Objective(ttft_seconds=1.0, percentile=0.99)
    stood = standing(objective, 950, 50, 100.0)
    assert stood.attained == pytest.approx(0.95)
    assert stood.burn_rate == pytest.approx(5.0)
    assert stood.budget_left == pytest.approx(-4.0)
    assert stood.goodput == pytest.approx(9.5)
    nothing = standing(objective, 0, 0, 100.0)
    assert (nothing.attained, nothing.burn_rate, nothing.goodput) == (None, None, 0.0)


def test_a_tally_forgets_and_survives_clock_steps() -> None:
    tally = Tally(seconds=60.0, slices=6)
    for at in range(0, 60, 10):
        tally.add(float(at), met=at >= 30)
    assert tally.counts(55.0) == (3, 3)
    assert tally.counts(85.0) == (3, 0)
    assert tally.counts(500.0) == (0, 0)
    tally.add(10.0, met=True)  # a step back counts for the latest slice
    assert tally.counts(55.0) == (4, 3)


@pytest.mark.parametrize("value", [10**400, math.inf, math.nan])
@pytest.mark.parametrize("key", ["percentile", "ttft_seconds", "tpot_seconds"])
def test_numbers_that_are_none_are_named(key: str, value: float) -> None:
    with pytest.raises(ObjectiveError, match=key):
        parse([{"ttft_seconds": 1.0, key: value}])
