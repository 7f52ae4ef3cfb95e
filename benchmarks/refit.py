"""One full refit of 64 cells of 4,096 samples on one core, and the memory of samples for 1,000 engines."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.planted import Plant, plant_samples
from guard.estimate.cells import fit_samples
from guard.estimate.samples import CAPACITY, Samples

BACKENDS, CLASSES = 4, 16
ROUNDS: Final = 7
GOAL_MS, GOAL_MIB = 100.0, 300.0
ENGINES: Final = 1000


def cells() -> list[tuple[str, str, str, Samples]]:
    """4 backends of 16 classes, each a full window of samples of 1,000 engines."""
    rng = np.random.default_rng(1)
    result = []
    for backend in range(BACKENDS):
        for class_ in range(CLASSES):
            samples = plant_samples(Plant(n=CAPACITY, path="drift", knee=1e-3), backend * CLASSES + class_).samples
            samples.data[2] = rng.integers(0, ENGINES // BACKENDS, CAPACITY) + backend * 1000
            result.append(("model", f"backend-{backend}", f"class-{class_:02}", samples))
    return result


def resident() -> float:
    """Resident memory of this process, MiB."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024.0
    return 0.0


def timings(data: list[tuple[str, str, str, Samples]]) -> Iterator[float]:
    """CPU milliseconds of every refit, of all threads of this process."""
    for _ in range(ROUNDS):
        start = time.process_time()
        found = fit_samples(data)
        yield (time.process_time() - start) * 1e3
        assert len(found) == BACKENDS * (CLASSES + 1)  # noqa: S101


def main() -> int:
    """Prints the cost; returns 1 when a goal is missed."""
    before = resident()
    data = cells()
    spent = sorted(timings(data))
    after = resident()
    print(f"refit of {len(data)} cells x {CAPACITY} samples, {ENGINES} engines, CPU of one core:")
    print(f"  median {spent[len(spent) // 2]:.0f} ms, least {spent[0]:.0f} ms   (goal {GOAL_MS:.0f} ms)")
    print(f"  memory of samples and fit {after - before:.0f} MiB   (goal {GOAL_MIB:.0f} MiB)")
    return int(spent[len(spent) // 2] > GOAL_MS or after - before > GOAL_MIB)
