"""A small edition of `python -m benchmarks planted`: what was planted is found."""

import pytest

from benchmarks.planted import Plant, plant_samples, run
from guard.estimate.cell import estimate

SEEDS = 6


@pytest.mark.parametrize(
    "plant",
    [
        Plant(knee=2e-4), Plant(knee=5e-3, path="drift"), Plant(confounded=True, rtt_error=0.1, outliers=0.02),
        Plant(noise=0.05, n=3000, path="drift", confounded=True),
    ],
)  # fmt: skip
def test_a_knee_is_found_where_it_is(plant):
    tally = run(plant, SEEDS)
    assert tally.claimed >= SEEDS - 1
    assert tally.knee_in >= tally.claimed - 2
    assert tally.departure_in >= SEEDS - 2
    assert tally.break_even_in >= SEEDS - 2
    ratios = tally.row()
    assert ratios["departure_ratio"] <= 1.5
    assert ratios["break_even_ratio"] <= 1.5


@pytest.mark.parametrize("shape", ["line", "queue"])
@pytest.mark.parametrize("ar", [0.0, 0.9])
@pytest.mark.parametrize("path", ["plateaus", "drift"])
def test_lines_and_queues_have_no_knee(shape, ar, path):
    tally = run(Plant(shape, ar=ar, path=path, confounded=True), SEEDS)
    assert tally.claimed == 0
    assert tally.queue == (SEEDS if shape == "queue" else 0)


def test_the_models_find_the_coefficients():
    planted = plant_samples(Plant("line", noise=0.05, n=4000), 1)
    cell, _ = estimate("m", "b", "c", planted.samples)
    size = cell.reference_matched * cell.bytes_per_token
    assert cell.fetch.kappa + cell.fetch.kappa_per_byte * size == pytest.approx(
        planted.plant.slope() * cell.reference_matched / 2400, rel=0.05
    )
    assert cell.serial_round_trips.value == pytest.approx(
        planted.plant.slope() * cell.reference_matched / 2400, rel=0.05
    )
    assert cell.prefill.seconds(3000, 3000, 6) == pytest.approx(
        (8e-3 + 3.2e-5 * 3000 + 5e-10 * 3000 * 1500) * 1.06, rel=0.02
    )
    assert cell.lookup.hit_probability == pytest.approx(0.65 / 0.85, abs=0.03)
