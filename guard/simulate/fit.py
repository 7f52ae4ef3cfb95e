"""Parameters of the simulator from a measured sweep (`kvguard sweep`), and how well they reproduce what was left out.

    prefill        = a + b*c                       over all samples of the lowest concurrency, c tokens computed
    lookup + fetch = t0 + kappa*RTT                over the tiers of remote reads at the lowest concurrency
    intake         = what TTFT has beside its parts
    readers        = of a few numbers, the one that the higher concurrencies of the fitted part like best

A sweep has one prompt length, so bytes cannot be told from t0, nor attention from b: both are folded in, and what was
fitted holds for prompts of about that length only.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from guard.errors import ConfigError
from guard.simulate.run import simulate
from guard.simulate.scenario import Scenario, parse

READERS: Final = (1, 2, 4, 8, 16)
CHUNKS: Final = (1024, 512, 256, 128, 64, 32, 16)
POLICIES: Final = {"remote": "always", "recompute": "never"}


@dataclass(frozen=True, slots=True)
class Point:
    """The mean of one tier, concurrency and road, in seconds and tokens."""

    rtt: float
    concurrency: int
    road: str
    n: int
    prompt: float
    computed: float
    ttft: float
    reading: float  # lookup, slot and fetch
    prefill: float


@dataclass(frozen=True, slots=True)
class Reproduced:
    """One point that was not fitted, and what the simulator makes of it."""

    point: Point
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over measured mean TTFT."""
        return self.simulated / self.point.ttft


def read(path: Path) -> list[Point]:
    """The points of a sweep, its directory or its `cells.jsonl`, over all its repeats.

    Raises:
        ConfigError: that is no sweep, or one without remote and recompute cells.
    """
    cells = path / "cells.jsonl" if path.is_dir() else path
    rows: dict[tuple[float, int, str], list[dict[str, Any]]] = defaultdict(list)
    try:
        for line in cells.read_text("utf-8").splitlines():
            found = json.loads(line)
            cell = found["cell"]
            rows[float(cell["rtt"]), int(cell["concurrency"]), str(cell["road"])] += found["samples"]
        points = [_point(*key, samples) for key, samples in sorted(rows.items()) if samples]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError("sweep", f"no results of a sweep in {path}: {error!r}") from error
    if not {"remote", "recompute"} <= {point.road for point in points}:
        raise ConfigError("sweep", f"{path} needs cells of both roads, remote and recompute")
    return points


def _point(rtt: float, concurrency: int, road: str, samples: list[dict[str, Any]]) -> Point:
    def mean(value: Callable[[dict[str, Any]], float]) -> float:
        return math.fsum(map(value, samples)) / len(samples)

    return Point(
        rtt, concurrency, road, len(samples), mean(lambda s: s["prompt"]),
        mean(lambda s: s["prompt"] - s["local"] - s["loaded"]), mean(lambda s: s["ttft"]),
        mean(lambda s: s["lookup"] + s["slot"] + s["fetch"]), mean(lambda s: s["prefill"]),
    )  # fmt: skip


def split(points: Iterable[Point]) -> tuple[list[Point], list[Point]]:
    """The part to fit (every second tier from the lowest, lowest and highest concurrency), and the rest."""
    points = list(points)
    tiers = sorted({point.rtt for point in points})
    levels = sorted({point.concurrency for point in points})
    fitted = {*tiers[::2]}
    ends = {levels[0], levels[-1]}
    part = [point for point in points if point.rtt in fitted and point.concurrency in ends]
    return part, [point for point in points if point not in part]


def fit(points: Sequence[Point], *, kind: str = "lmcache-mp", chunk_tokens: int | None = None) -> Scenario:
    """One engine and its connector as these points tell them; chunks of the size that their loads tell, if not given.

    Raises:
        ConfigError: the points hold fewer than two tiers of remote reads, or no recompute, at the lowest concurrency.
    """
    lowest = min(point.concurrency for point in points)
    alone = [point for point in points if point.concurrency == lowest]
    remote = [point for point in alone if point.road == "remote"]
    if len({point.rtt for point in remote}) < 2:
        raise ConfigError("sweep", "needs remote reads at two tiers of RTT at the lowest concurrency")
    if len({round(point.computed) for point in alone}) < 2:
        raise ConfigError("sweep", "needs recomputed prompts at the lowest concurrency")
    chunk_tokens = chunk_tokens or _chunk(remote[0])
    step, token = _line([p.computed for p in alone], [p.prefill for p in alone])
    fixed, kappa = _line([p.rtt for p in remote], [p.reading for p in remote])
    other = [p.ttft - p.reading - p.prefill for p in alone]
    chunks = max(1, round(np.mean([p.prompt for p in remote])) // chunk_tokens)
    data = {
        "title": "fitted to a sweep", "seconds": "24h", "patience": "24h",
        "engine": {"count": 1, "step_seconds": step, "token_seconds": token, "attention_seconds": 0.0,
                   "intake_seconds": max(0.0, float(np.median(other))), "local_tokens": 1, "noise": 0.0,
                   "max_batched_tokens": 1_000_000, "kv_tokens": 100_000_000},
        "connector": {"kind": kind, "chunk_tokens": chunk_tokens, "bytes_per_token": 1, "lookup_seconds": fixed,
                      "fetch_seconds": 0.0, "lookup_trips": kappa / chunks, "fetch_trips": 0.0, "timeout": "24h"},
        "link": {"gbit": 1e6, "jitter": 0.0},
    }  # fmt: skip
    crowded = [point for point in points if point.concurrency > lowest and point.road == "remote"]
    made = [parse({**data, "connector": {**data["connector"], "readers": n}}) for n in READERS]  # type: ignore[dict-item]
    return min(made, key=lambda one: sum(math.log(each.ratio) ** 2 for each in reproduce(one, crowded)))


def reproduce(scenario: Scenario, points: Iterable[Point]) -> list[Reproduced]:
    """What the simulator makes of each point that is remote or recomputed."""
    return [
        Reproduced(point, _mean(scenario, point, POLICIES[point.road])) for point in points if point.road in POLICIES
    ]


def _mean(scenario: Scenario, point: Point, policy: str) -> float:
    turns = max(1, round(point.n / point.concurrency))
    workload = {
        "kind": "closed", "concurrency": point.concurrency, "prompt_tokens": round(point.prompt), "turns": turns,
        "output_tokens": 1, "moved": 0.0,
    }  # fmt: skip
    data = scenario.model_dump(by_alias=True)
    link = {**data["link"], "rtt": point.rtt}
    return float(np.mean(simulate(parse({**data, "workload": workload, "link": link}), policy).ttft()))


def _chunk(remote: Point) -> int:
    """The largest size of which whole chunks of the prompt, its last token left out, make what was loaded."""
    loaded = remote.prompt - remote.computed
    return min(CHUNKS, key=lambda size: abs((round(remote.prompt) - 1) // size * size - loaded))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both at least 0, by least squares of the relative error."""
    xs, ys = np.asarray(x), np.maximum(np.asarray(y), 1e-9)
    design = np.column_stack([1.0 / ys, xs / ys])
    intercept, slope = np.linalg.lstsq(design, np.ones_like(ys), rcond=None)[0]
    if intercept < 0.0:
        return 0.0, float(np.mean(ys / np.maximum(xs, 1e-12)))
    if slope < 0.0:
        return float(np.mean(ys)), 0.0
    return float(intercept), float(slope)
