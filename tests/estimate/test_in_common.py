"""What a read costs and what it saves are measured on the same requests: their errors are drawn together."""

import numpy as np
import pytest

from benchmarks.planted import Plant, plant_samples
from guard.estimate import inflection
from guard.estimate.cell import estimate
from guard.estimate.inflection import NOTHING, Parts, in_common


def parts_of(common):
    nothing = np.zeros((2, 2))
    return Parts((0.1, 0.01), (0.02, 0.0), (0.005, 0.0, nothing), (0.7, 0.0), common)


@pytest.mark.parametrize("alike", [-0.6, 0.0, 0.6])
def test_draws_are_as_alike_as_the_blocks(alike):
    rng = np.random.default_rng(7)
    pull = rng.standard_normal(400)
    other = alike * pull + (1.0 - alike**2) ** 0.5 * rng.standard_normal(400)
    cost = inflection.LEVEL * 0.003 + 0.06
    common = in_common(cost, pull, other)
    assert common[0] == pytest.approx(alike, abs=0.1)
    saved = parts_of(common).draw_saved()
    assert np.corrcoef(saved, cost)[0, 1] == pytest.approx(common[0], abs=0.1)
    assert saved.mean() == pytest.approx(0.1, abs=0.001)
    assert saved.std() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("cost", "pull", "other"),
    [
        (inflection.LEVEL, np.ones(19), np.ones(19)),  # too few blocks
        (inflection.LEVEL, np.zeros(60), np.ones(60)),  # blocks without reads
        (inflection.LEVEL, np.ones(60), np.zeros(60)),
        (np.full(400, 0.06), np.ones(60), np.ones(60)),
    ],
)
def test_what_tells_nothing_has_nothing_in_common(cost, pull, other):
    assert in_common(cost, pull, other) is NOTHING


def test_a_slow_time_of_reads_and_prefill_alike_hardly_widens_break_even():
    ratios = []
    for seed in range(8):
        plant = Plant("line", ar=0.9, n=1000, confounded=True, rtt_error=0.1, outliers=0.02)
        even = estimate("m", "b", "c", plant_samples(plant, seed).samples)[0].break_even
        ratios.append(even.high / even.low)
    assert np.median(ratios) < 1.5  # 1.6 with errors drawn apart
