"""A lookup that finds nothing waits for a step of the engine; what that takes is no noise of the reads."""

import random

import pytest

from guard.control.projection import coefficients, costs_of, project
from guard.control.shapes import Evidence

READ, NOISE = 0.12, 0.1


@pytest.fixture(scope="module")
def mixed(request_of, pool_of):
    """As on a lab of two cores: hits of a steady 0.12 s, and twice as many misses, whose lookups take 5 ms to 1.5 s."""
    rng, records = random.Random(3), []
    for number in range(200):
        if number % 10 < 3:
            more = {"matched": 1280, "lookup": 0.08 * rng.lognormvariate(0.0, NOISE), "fetch": 0.04, "prefill": 0.02}
        else:
            more = {"lookup": 0.09 * rng.lognormvariate(0.0, 1.3), "prefill": 0.22 * rng.lognormvariate(0.0, NOISE)}
        records.append(request_of(number, prompt=1300, rtt=1e-4, size=5_000_000, **more))
    return pool_of(records)


def test_the_spread_of_reads_is_theirs(mixed):
    assert mixed.lookup.spread > 0.5
    assert mixed.read_spread == pytest.approx(NOISE * 0.08 / READ, rel=0.3)


def test_a_read_that_pays_is_projected_to_pay(mixed):
    wanted = coefficients(Evidence(cells={"all": mixed}, rtt=1e-4))
    projection = project(Evidence(cells={"all": mixed}, rtt=1e-4), costs_of(wanted))

    assert wanted.fetch["spread"] == pytest.approx(mixed.read_spread, rel=1e-3)
    assert projection.remote == pytest.approx(READ + 0.02, rel=0.15)
    assert projection.remote_tail < projection.recompute  # so that a read that is stuck is seen as such, too
