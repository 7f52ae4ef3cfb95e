import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import policies
from guard.errors import ConfigError
from guard.simulate import fit
from guard.simulate.fit import Point
from guard.simulate.scenario import parse

TRUE = parse(
    {
        "seconds": "24h",
        "patience": "24h",
        "engine": {"count": 1, "step_seconds": 0.03, "token_seconds": 9e-5, "attention_seconds": 0, "noise": 0,
                   "intake_seconds": 0.004, "local_tokens": 1, "max_batched_tokens": 100000},
        "connector": {"chunk_tokens": 128, "bytes_per_token": 1, "lookup_seconds": 0.02, "lookup_trips": 2.0,
                      "fetch_trips": 0.0, "fetch_seconds": 0.0, "readers": 2, "timeout": "24h"},
        "link": {"gbit": 1e6, "jitter": 0.0},
    }
)  # fmt: skip
TIERS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02)


def sweep(directory: Path, *, noise: float = 0.03, roads: tuple[str, ...] = ("remote", "recompute")) -> Path:
    """A sweep of 4,000-token prompts as `kvguard sweep` leaves it, made by the model itself and blurred."""
    rng = random.Random(5)
    lines = []
    for rtt in TIERS:
        for concurrency in (1, 4, 8):
            for road in roads:
                shape = Point(rtt, concurrency, road, 16, 4000, 0, 1.0, 0, 0)
                (true,) = fit.reproduce(TRUE, [shape])
                loaded = 3968 if road == "remote" else 0
                reading = 0.02 + 62 * rtt if road == "remote" else 0.0
                prefill = 0.03 + 9e-5 * (4000 - loaded)
                lines.append({"cell": {"rtt": rtt, "concurrency": concurrency, "road": road, "repeat": 0}, "strays": 0,
                              "rtt": None, "at": 0.0, "samples": [_sample(true.simulated, reading, prefill, loaded, rng, noise) for _ in range(16)]})  # noqa: E501  # fmt: skip
    (directory / "cells.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8")
    return directory


def _sample(
    ttft: float, reading: float, prefill: float, loaded: int, rng: random.Random, noise: float
) -> dict[str, Any]:
    blur = rng.lognormvariate(0.0, noise)
    return {"ttft": ttft * blur, "hook_ttft": ttft * blur, "prompt": 4000, "local": 0, "loaded": loaded,
            "lookup": reading * blur, "slot": 0.0, "fetch": 0.0, "prefill": prefill * blur, "round_trips": None,
            "decision": "remote"}  # fmt: skip


def test_a_part_of_a_sweep_gives_parameters_that_reproduce_the_rest(tmp_path: Path):
    points = fit.read(sweep(tmp_path))
    assert len(points) == len(TIERS) * 6
    part, rest = fit.split(points)
    assert {point.rtt for point in part} == {0.0, 0.002, 0.01}
    assert {point.concurrency for point in part} == {1, 8}
    assert not set(part) & set(rest)
    found = fit.fit(part, chunk_tokens=128)
    assert found.engine.token_seconds == pytest.approx(9e-5, rel=0.05)
    assert found.connector.lookup_trips == pytest.approx(2.0, rel=0.05)
    assert found.connector.lookup_seconds == pytest.approx(0.02, rel=0.1)
    assert found.connector.readers == 2
    ratios = [each.ratio for each in fit.reproduce(found, rest)]
    assert len(ratios) == len(rest)
    assert max(ratios) < 1.15
    assert min(ratios) > 0.85


def test_chunks_are_of_the_size_that_the_loads_tell(tmp_path: Path):
    part, _ = fit.split(fit.read(sweep(tmp_path)))
    assert fit.fit(part).connector.chunk_tokens == 128


def test_the_command_prints_what_was_fitted_and_every_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sweep(tmp_path)
    assert policies.main(["--only", "lab", "--sweep", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "fitted to 12 of 36 points" in text
    assert "2.0" in text.split(" ms + ")[2]  # round trips a chunk
    assert (text.count("  fitted "), text.count("  held out "), "missed" in text) == (12, 24, False)
    assert "24 of 24 goals met" in text
    cells = tmp_path / "cells.jsonl"
    lines = [json.loads(line) for line in cells.read_text("utf-8").splitlines()]
    for line in lines:
        if (line["cell"]["rtt"], line["cell"]["concurrency"], line["cell"]["road"]) == (0.005, 4, "remote"):
            for each in line["samples"]:
                each["ttft"] *= 1.5
    cells.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    assert policies.main(["--only", "lab", "--sweep", str(cells)]) == 1
    assert capsys.readouterr().out.count("missed") == 1
    with pytest.raises(SystemExit):
        policies.main(["--only", "lab"])


def test_wrong_parameters_do_not_reproduce_it(tmp_path: Path):
    _, rest = fit.split(fit.read(sweep(tmp_path)))
    slow = TRUE.model_copy(update={"connector": TRUE.connector.model_copy(update={"lookup_trips": 4.0})})
    assert max(each.ratio for each in fit.reproduce(slow, rest)) > 1.5


def test_what_cannot_be_fitted_says_why(tmp_path: Path):
    with pytest.raises(ConfigError, match="no results of a sweep"):
        fit.read(tmp_path)
    with pytest.raises(ConfigError, match="both roads"):
        fit.read(sweep(tmp_path, roads=("remote",)))
    points = fit.read(sweep(tmp_path))
    with pytest.raises(ConfigError, match="two tiers"):
        fit.fit([point for point in points if point.rtt == 0.0])
    with pytest.raises(ConfigError, match="recomputed"):
        fit.fit([point for point in points if point.road == "remote"])
