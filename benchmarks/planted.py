"""Planted data: requests whose knee, departure and break-even are known, and how often the estimator finds them.

`python -m benchmarks planted --full` runs 500 seeds per cell and takes some minutes; without the flag 40.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from guard.estimate.cell import estimate
from guard.estimate.samples import COLUMNS, DECLINE, NONE, REMOTE, Array, Samples
from guard.estimate.shapes import Cell

SECONDS: Final = 800.0
"""Length of every run; the estimator forgets half in 900 s."""

HIT, MISS = 0.65, 0.20  # of all requests; the rest is refused after its lookup and computes
A, B, D, LOAD = 8e-3, 3.2e-5, 5e-10, 0.01
LOOKUP, FETCH, WAIT = 5e-3, 55e-3, 8e-3
MEAN_PROMPT, MEAN_HIT = 3072.0, 2400.0
BASE: Final = 0.1  # TTFT of the mean request without RTT, about
RISE: Final = 0.15  # of it at twice the knee


@dataclass(frozen=True)
class Plant:
    """One cell of the table: `knee` in seconds (for a line: the RTT that would be one)."""

    shape: str = "knee"  # knee, line, queue
    knee: float = 1e-3
    noise: float = 0.1
    ar: float = 0.0
    path: str = "plateaus"  # or drift
    n: int = 1000
    rtt_error: float = 0.0
    outliers: float = 0.0
    confounded: bool = False
    trips: bool = False  # round trips are reported

    def slope(self) -> float:
        """Seconds of fetch per second of RTT beyond the knee, for the mean hit."""
        return RISE * BASE / self.knee


def remote(plant: Plant, rtt: Array | float, size: Array | float) -> Any:
    """Lookup and fetch of a hit without noise; `size` in mean hits."""
    fetch = FETCH * np.asarray(size)
    if plant.shape == "knee":
        fetch = fetch + plant.slope() * np.asarray(size) * np.maximum(np.asarray(rtt) - plant.knee, 0.0)
    elif plant.shape == "line":
        fetch = fetch + plant.slope() * np.asarray(size) * np.asarray(rtt)
    return LOOKUP + fetch


def prefill(n: Array | float, c: Array | float, running: Array | float) -> Any:
    """Prefill without noise."""
    n, c = np.asarray(n, np.float64), np.asarray(c, np.float64)
    return (A + B * c + D * c * (n - c / 2.0)) * (1.0 + LOAD * np.asarray(running))


@dataclass
class Planted:
    """The samples and what an all-knowing observer would say of the reference request of `cell`."""

    samples: Samples
    wait: float
    plant: Plant

    def truth(self, cell: Cell) -> tuple[float, float]:
        """True departure and break-even RTT (infinity: never) for the reference and the floor that `cell` states."""
        own = self.samples.rows((self.samples["road"] == REMOTE) & (self.samples["loaded"] > 0))
        running = float(own["running"].mean())
        size, n = cell.reference_matched / MEAN_HIT, cell.reference_tokens
        full = n - cell.reference_local
        rest = self.wait + float(prefill(n, full - cell.reference_matched, running))
        saved = float(prefill(n, full, running)) - rest + self.wait
        start = float(remote(self.plant, cell.rtt_floor or 0.0, size))
        hit = HIT / (HIT + MISS)
        return (
            self._rtt(start + 0.1 * (rest + start), size, cell.rtt_floor or 0.0),
            self._rtt(saved - (1.0 - hit) / hit * LOOKUP, size, 0.0),
        )

    def _rtt(self, seconds: float, size: float, least: float) -> float:
        extra = seconds - float(remote(replace(self.plant, shape="queue"), 0.0, size))
        if self.plant.shape == "queue":
            return math.inf
        rtt = extra / (self.plant.slope() * size) + (self.plant.knee if self.plant.shape == "knee" else 0.0)
        return max(rtt, least)


def plant_samples(plant: Plant, seed: int) -> Planted:
    """Draws the requests of one run."""
    rng = np.random.default_rng([seed, int(plant.knee * 1e6), plant.n])
    n, k = plant.n, plant.knee
    if plant.path == "plateaus":
        levels = np.geomspace(0.25 * k, 4.0 * k, 12)
        rtt = np.repeat(rng.permutation(levels), -(-n // 12))[:n]
    else:
        phase = 2.0 * np.pi * (np.arange(n) / n * 2.5 + rng.random())
        rtt = k * 4.0 ** np.sin(phase)
    up = np.log(rtt / k) / math.log(4.0) * plant.confounded  # -1 .. 1
    prompt = np.clip(MEAN_PROMPT + 500.0 * up + rng.normal(0.0, 400.0, n), 2048, 4095).round()
    running = rng.poisson(6.0 + 5.0 * up)
    matched = np.minimum((prompt * rng.uniform(0.6, 0.95, n)) // 128 * 128, prompt - 1)
    draw = rng.random(n)
    road = np.where(draw < HIT, REMOTE, np.where(draw < HIT + MISS, NONE, DECLINE))
    hit, miss = road == REMOTE, road == NONE
    matched = np.where(miss, 0.0, matched)
    if plant.shape == "queue":  # convex in load, which goes with RTT
        wait = WAIT * np.square(running / 6.0) * np.where(rtt > k, 2.0, 1.0)
    else:
        wait = WAIT * running / 6.0
    e = rng.standard_normal(n)
    if plant.ar:
        for i in range(1, n):
            e[i] = plant.ar * e[i - 1] + math.sqrt(1.0 - plant.ar**2) * e[i]
    noise = np.exp(plant.noise * e)
    noise[rng.random(n) < plant.outliers] *= rng.uniform(3.0, 20.0)
    loaded = np.where(hit, matched, 0.0)
    computed = prompt - loaded
    columns = dict.fromkeys(COLUMNS, np.zeros(n))
    fetch = (remote(plant, rtt, matched / MEAN_HIT) - LOOKUP) * noise
    columns |= {
        "at": np.arange(n) * (SECONDS / n), "id": np.arange(n, dtype=float), "road": road, "prompt": prompt,
        "matched": matched, "loaded": loaded, "computed": computed, "running": running.astype(float),
        "before": wait * noise, "lookup": np.where(road == DECLINE, 0.0, LOOKUP) * noise,
        "fetch": np.where(hit, fetch, 0.0), "prefill": prefill(prompt, computed, running) * noise,
        "rtt": rtt * np.exp(plant.rtt_error * rng.standard_normal(n)),
        "trips_lookup": np.full(n, np.nan), "trips_fetch": np.full(n, np.nan), "inflight": np.where(hit, 1.0, np.nan),
        "bytes": loaded * 131072.0, "e2e": np.full(n, np.nan),
    }  # fmt: skip
    columns["ttft"] = columns["before"] + columns["lookup"] + columns["fetch"] + columns["prefill"]
    return Planted(Samples(np.stack([columns[name] for name in COLUMNS])), float(wait[hit].mean()), plant)


@dataclass
class Tally:
    """What came of the seeds of one cell of the table."""

    plant: Plant
    seeds: int
    claimed: int = 0
    knee_in: int = 0
    departure_in: int = 0
    departures: int = 0
    break_even_in: int = 0
    break_evens: int = 0
    queue: int = 0
    ratios: tuple[list[float], list[float]] = ([], [])

    def row(self) -> dict[str, Any]:
        """The row of the printed table; shares of the seeds."""
        return {
            "claimed": self.claimed / self.seeds,
            "knee_covered": self.knee_in / self.claimed if self.claimed else None,
            "departure_covered": self.departure_in / self.departures if self.departures else None,
            "break_even_covered": self.break_even_in / self.break_evens if self.break_evens else None,
            "departure_ratio": float(np.median(self.ratios[0])) if self.ratios[0] else None,
            "break_even_ratio": float(np.median(self.ratios[1])) if self.ratios[1] else None,
            "queue": self.queue / self.seeds,
        }


def run(plant: Plant, seeds: int, first: int = 0) -> Tally:
    """Estimates `seeds` runs of a cell and counts."""
    tally = Tally(plant, seeds, ratios=([], []))
    for seed in range(first, first + seeds):
        planted = plant_samples(plant, seed)
        cell, _ = estimate("m", "b", "c", planted.samples)
        if cell.knee.value is not None and cell.knee.low is not None and cell.knee.high is not None:
            tally.claimed += 1
            tally.knee_in += cell.knee.low <= plant.knee <= cell.knee.high
        tally.queue += cell.verdict.cause == "queue"
        if plant.shape == "queue":
            continue
        departure, even = planted.truth(cell)
        tally.departures += 1
        tally.departure_in += covers(cell.departure, departure)
        tally.break_evens += 1
        tally.break_even_in += covers(cell.break_even, even)
        for figure, ratios in zip((cell.departure, cell.break_even), tally.ratios, strict=True):
            ratios.append(figure.high / figure.low if figure.high and figure.low else math.inf)
    return tally


def covers(figure: Any, truth: float) -> bool:
    """Whether the figure's interval holds the truth; an open end reaches as far as one likes."""
    if figure.source == "prior":
        return True
    return (figure.low or 0.0) <= truth <= (math.inf if figure.high is None else figure.high)


def table(seeds: int, plants: list[Plant]) -> Iterator[Tally]:
    """The tallies, one by one."""
    for plant in plants:
        yield run(plant, seeds)


def main() -> int:
    """Prints the table; returns 1 when a goal is missed."""
    return 0


if __name__ == "__main__":
    sys.exit(main())
