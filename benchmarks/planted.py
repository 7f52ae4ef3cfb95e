"""Planted data: requests whose knee, departure and break-even are known, and how often the estimator finds them.

`python -m benchmarks planted --full` runs 500 seeds per cell and takes some minutes; without the flag 40.
`--cells=36,49` runs only these cells, counted from 0. `--first SEED` is the first seed: the method was tuned on some
of the seeds from 0, so judge by others (`make planted` begins at 100,000).
"""

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor
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
        # Right on average: a bias of the measurement moves every RTT told by as much, and no estimator can know.
        "rtt": rtt * np.exp(plant.rtt_error * rng.standard_normal(n) - 0.5 * plant.rtt_error**2),
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


@dataclass(frozen=True)
class Goal:
    """One goal of the table: which figure, of which cells, at the least (or between)."""

    text: str
    figure: str
    least: float
    most: float = 1.0

    def applies(self, plant: Plant) -> bool:
        """Whether a cell has to meet it."""
        easy = plant.n >= 1000 and plant.noise <= 0.1
        bent, line = plant.shape == "knee", plant.shape == "line"
        return {
            "knee_covered": bent,
            "claimed": bent and easy and not plant.ar,
            "not_claimed": not bent,
            "queue": plant.shape == "queue",
            "departure_covered": bent or line,
            "break_even_covered": bent or line,
            "departure_ratio": (bent or line) and easy,
            "break_even_ratio": (bent or line) and easy,
        }[self.figure]


GOALS: Final = (
    Goal("knee inside its interval where one is claimed", "knee_covered", 0.92, 0.98),
    Goal("knee claimed (n >= 1000, independent noise <= 10 %)", "claimed", 0.90),
    Goal("no knee claimed of lines and queues", "not_claimed", 0.99),
    Goal("cause of queues is queue", "queue", 0.99),
    Goal("departure inside its interval", "departure_covered", 0.93),
    Goal("break-even inside its interval", "break_even_covered", 0.93),
    Goal("median upper/lower of departure (n >= 1000, noise <= 10 %)", "departure_ratio", 0.0, 1.5),
    Goal("median upper/lower of break-even (same)", "break_even_ratio", 0.0, 1.5),
)
_LEAST_CLAIMS: Final = 50  # fewer claims than this tell no coverage


def plants() -> list[Plant]:
    """The cells of the table."""
    cells = [
        Plant(knee=knee, noise=noise, n=n, path=path)
        for knee in (1e-4, 5e-4, 1e-3, 1e-2)
        for noise in (0.05, 0.2)
        for n, path in ((300, "plateaus"), (1000, "drift"), (5000, "plateaus"))
    ]
    cells += [Plant(knee=2e-4, noise=0.1, n=n, path=path) for n in (1000, 3000) for path in ("plateaus", "drift")]
    cells += [Plant(ar=ar, path=path, n=n) for ar in (0.5, 0.9) for path in ("plateaus", "drift") for n in (1000, 5000)]
    cells += [
        replace(Plant(knee=knee, rtt_error=0.1, outliers=0.02, confounded=True), path=path, n=n, noise=noise)
        for knee in (3e-4, 3e-3) for path in ("plateaus", "drift") for n, noise in ((1000, 0.1), (3000, 0.05))
    ]  # fmt: skip
    cells += [
        Plant(shape, ar=ar, path=path, n=n, confounded=True, noise=noise, rtt_error=0.1, outliers=0.02)
        for shape in ("line", "queue") for path in ("plateaus", "drift")
        for n, noise, ar in ((300, 0.2, 0.9), (1000, 0.1, 0.0), (1000, 0.1, 0.9), (5000, 0.05, 0.5))
    ]  # fmt: skip
    return cells


def values(tally: Tally) -> dict[str, float | None]:
    """The figures that goals are about."""
    row = tally.row()
    row["not_claimed"] = 1.0 - row["claimed"]
    if tally.claimed < min(_LEAST_CLAIMS, tally.seeds):
        row["knee_covered"] = None
    return row


def main() -> int:
    """Prints the table and how many cells meet each goal; returns 1 when one does not."""
    options = argparse.ArgumentParser(prog="python -m benchmarks planted", allow_abbrev=False)
    options.add_argument("--full", action="store_true", help="500 seeds a cell instead of 40")
    options.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    options.add_argument("--cells", type=lambda text: [int(word) for word in text.split(",")], help="only these")
    options.add_argument("--one", action="store_true", help="one process instead of two")
    asked, _ = options.parse_known_args()
    seeds, first, chosen = 500 if asked.full else 40, asked.first, plants()
    if asked.cells:
        chosen = [chosen[index] for index in asked.cells]
    print(f"planted data: {len(chosen)} cells, {seeds} seeds each from {first}; shares of seeds, 95 % intervals")
    print(
        f"{'shape':6}{'knee ms':>8}{'noise':>6}{'AR':>4}{'n':>6} {'RTT path':9}{'extra':14}{'claimed':>8}{'knee in':>8}"
        f"{'dep. in':>8}{'b.e. in':>8}{'dep u/l':>8}{'b.e. u/l':>9}{'queue':>7}"
    )
    met, missed = dict.fromkeys(GOALS, 0), {goal: [] for goal in GOALS}
    with ProcessPoolExecutor(max_workers=1 if asked.one else 2) as pool:
        for tally in pool.map(run, chosen, [seeds] * len(chosen), [first] * len(chosen)):
            print(_line(tally), flush=True)
            found = values(tally)
            for goal in GOALS:
                value = found[goal.figure]
                if goal.applies(tally.plant) and value is not None:
                    good = goal.least <= value <= goal.most
                    met[goal] += good
                    if not good:
                        missed[goal].append(value)
    for goal in GOALS:
        total = met[goal] + len(missed[goal])
        bound = f"{goal.least:g} to {goal.most:g}"
        worst = f"; missed with {', '.join(f'{value:.3f}' for value in sorted(missed[goal]))}" if missed[goal] else ""
        print(f"goal {bound:>11}  {goal.text}: {met[goal]} of {total} cells{worst}")
    return int(any(missed.values()))


def _line(tally: Tally) -> str:
    plant, row = tally.plant, tally.row()
    extra = ",".join(
        name
        for name, on in (("err", plant.rtt_error), ("out", plant.outliers), ("conf", plant.confounded))
        if on
    )  # fmt: skip
    shown = "".join(
        f"{'-' if row[name] is None else format(row[name], '.3f'):>{width}}"
        for name, width in (
            ("claimed", 8), ("knee_covered", 8), ("departure_covered", 8), ("break_even_covered", 8),
            ("departure_ratio", 8), ("break_even_ratio", 9), ("queue", 7),
        )
    )  # fmt: skip
    return (
        f"{plant.shape:6}{plant.knee * 1e3:8.2f}{plant.noise:6.2f}{plant.ar:4.1f}{plant.n:6} {plant.path:9}{extra:14}"
        + shown
    )


if __name__ == "__main__":
    sys.exit(main())
