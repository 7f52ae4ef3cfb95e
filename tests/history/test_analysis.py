"""Answers from made-up histories: what was planted is found, what was not is not."""

import json
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from guard.cli.app import app
from guard.history import analysis
from tests.history.requests import FIRST_DAY, history

FIRST, SECOND = (str(date(1970, 1, 1) + timedelta(days=FIRST_DAY + n)) for n in range(2))


def write(place: Path, *frames: pl.DataFrame) -> str:
    place.mkdir()
    for number, frame in enumerate(frames):
        frame.write_parquet(place / f"{number}.parquet")
    return str(place)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    frames = (history(40_000, 1), history(40_000, 2, day=FIRST_DAY + 1, slower=1.3))
    return write(tmp_path_factory.mktemp("history") / "h", *frames)


def test_days(place: str) -> None:
    assert analysis.days(analysis.scan(place), place) == [(FIRST, 40_000), (SECOND, 40_000)]


def test_the_planted_regression_is_found_and_nothing_else(place: str) -> None:
    found = analysis.regressions(analysis.scan(place), FIRST, SECOND)
    slower = [row for row in found if row["verdict"] == "slower"]
    assert {(row["class"], row["decision"], row["measure"]) for row in slower} == {
        ("8k-16k/c0-4", "remote", "ttft_p50"), ("8k-16k/c0-4", "remote", "ttft_p95"),
    }  # fmt: skip
    for row in slower:
        assert row["low"] < 1.3 < row["high"]
        assert row["high"] - row["low"] < 0.03
        assert (row["blocks"], row["source"]) == (144, "measured")
    assert {row["verdict"] for row in found if row not in slower} == {"same"}
    back = analysis.regressions(analysis.scan(place), SECOND, FIRST)
    assert sum(row["verdict"] == "faster" for row in back) == 2


def test_too_little_data_is_said_and_not_judged(tmp_path: Path) -> None:
    day = history(40_000, 1)
    hour = day.filter(pl.col("arrival_ns") % (86_400 * 10**9) < 3600 * 10**9)  # 6 blocks
    place = write(tmp_path / "h", day, hour.with_columns(pl.col("arrival_ns") + 86_400 * 10**9, pl.col("ttft") * 2))
    found = analysis.regressions(analysis.scan(place), FIRST, SECOND)
    assert {row["verdict"] for row in found} == {"insufficient-data"}
    assert {(row["ratio"], row["blocks"]) for row in found} == {(None, 6)}


def test_the_slowest(place: str) -> None:
    rows = analysis.slowest(analysis.scan(place), 5)
    all_rows = pl.concat([history(40_000, 1), history(40_000, 2, day=FIRST_DAY + 1, slower=1.3)])
    assert [row["ttft"] for row in rows] == sorted(all_rows["ttft"], reverse=True)[:5]


def test_hits_are_worth_what_was_planted(place: str) -> None:
    rows = {row["prefix"]: row for row in analysis.hit_value(analysis.scan(place))}
    assert set(rows) == {"512-1k", "4k-8k"}
    short, long = rows["512-1k"], rows["4k-8k"]
    assert short["value_seconds"] == pytest.approx(1010 * 9e-6 - 0.020, abs=0.0006)
    assert long["value_seconds"] == pytest.approx(6010 * 9e-6 - 0.020, rel=0.05)
    for row in (short, long):
        assert row["low"] < row["value_seconds"] < row["high"]
        assert row["source"] == "projected"
    assert short["share_won"] < 0.02
    assert long["share_won"] > 0.95
    assert short["n"] + short["outside"] + long["n"] + long["outside"] == pytest.approx(40_000, abs=500)


def test_hits_that_nothing_can_be_compared_with_are_left_out(tmp_path: Path) -> None:
    day = history(20_000, 1).filter((pl.col("decision") == "none") | (pl.col("prompt_tokens") > 5000))
    lone = day.filter((pl.col("decision") == "remote") | (pl.col("prompt_tokens") < 5000))
    place = write(tmp_path / "h", lone)
    (row,) = analysis.hit_value(analysis.scan(place))
    assert (row["n"], row["value_seconds"], row["share_won"]) == (0, None, None)
    assert row["outside"] > 4000


@pytest.mark.parametrize(("freedom", "table"), [(7, 2.3646), (10, 2.2281), (30, 2.0423), (143, 1.9767)])
def test_student_is_that_of_the_tables(freedom: int, table: float) -> None:
    assert analysis._student(freedom) == pytest.approx(table, rel=2e-3)


def test_older_and_newer_columns_are_read(tmp_path: Path) -> None:
    frame = history(100, 1).drop("propensity").with_columns(pl.lit(1).alias("from_the_future"))
    place = write(tmp_path / "h", frame)
    assert analysis.days(analysis.scan(place), place) == [(FIRST, 100)]


def test_the_command(place: str, tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(app, ["analyze", place, "--json", "--limit", "3"])
    assert done.exit_code == 1  # something got slower
    report = json.loads(done.stdout)
    assert (report["before"], report["after"], len(report["slowest"])) == (FIRST, SECOND, 3)
    words = run(app, ["analyze", place])
    assert "x1.3" in words.stdout
    assert "8k-16k/c0-4" in words.stdout
    calm = run(app, ["analyze", place, "--after", FIRST])
    assert (calm.exit_code, "only one day" in calm.stdout) == (0, True)
    assert run(app, ["analyze", place, "--before", "2001-01-01"]).exit_code == 2
    assert run(app, ["analyze", place, "--before", "yesterday"]).exit_code == 2
    nothing = run(app, ["analyze", str(tmp_path)])
    assert nothing.exit_code == 1
    assert str(tmp_path) in nothing.stderr
    assert "Traceback" not in nothing.stderr


def test_times_of_a_row_are_those_of_the_frame() -> None:
    assert np.datetime64(FIRST_DAY, "D").astype(str) == FIRST
