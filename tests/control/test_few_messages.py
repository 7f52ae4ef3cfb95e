"""Hooks are not woken for noise, that of coefficients which are about 0 least of all."""

from dataclasses import replace
from typing import Any

import pytest

from guard.control.projection import coefficients, held
from guard.control.shapes import Coefficients, Evidence
from guard.estimate.shapes import LookupModel
from tests.control.plant import CELL, MATCH, PROMPT

LOOKUP = LookupModel(
    t0=0.001, kappa=1.0, seconds_per_byte=1e-12, hit_probability=1.0, expected_tokens=MATCH, held_tokens=MATCH,
    held_prompt=PROMPT, held_per_token=0.01, sends_local=True, spread=0.06, n=500,
)  # fmt: skip


def told(fetch: float = 1e-8, **changed: Any) -> Coefficients:
    model = replace(CELL.fetch, seconds_per_byte=fetch) if CELL.fetch else None
    cell = replace(CELL, fetch=model, lookup=replace(LOOKUP, **changed))
    found = coefficients(Evidence(cells={"all": cell}, rtt=2e-4))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("noise", "change"),
    [
        ({"held_per_token": 0.0}, {"held_per_token": 0.2}),
        ({"held_per_token": 0.1}, {"held_per_token": 1.0}),
        ({"seconds_per_byte": 0.0}, {"seconds_per_byte": 1e-9}),
        ({"seconds_per_byte": 9e-11}, {"seconds_per_byte": 2e-10}),  # the read takes 0.05 s for 3.84 MB
        ({"fetch": 1.09e-8}, {"fetch": 1.2e-8}),
        ({"t0": 0.00105}, {"t0": 0.0014}),
    ],
)
def test_what_is_about_nothing_is_told_when_it_is_a_part_of_a_read(
    noise: dict[str, float], change: dict[str, float]
) -> None:
    sent, moved = told(), told(**change)
    assert held(sent, told(**noise)) is sent
    assert held(sent, moved) is moved


def test_a_small_cost_per_byte_is_no_part_of_a_read_either_way() -> None:
    low, high = told(seconds_per_byte=0.0), told(seconds_per_byte=9e-11)
    assert held(low, high) is low
    assert held(high, low) is high


def test_coefficients_that_another_version_kept_are_told_anew() -> None:
    wanted = told()
    fetch = {key: value for key, value in wanted.fetch.items() if key != "lookup_per_local_byte"}
    assert held(replace(wanted, fetch=fetch), wanted) is wanted
    assert held(replace(wanted, classes={}), wanted) is wanted
    assert held(Coefficients(), wanted) is wanted
