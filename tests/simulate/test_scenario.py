from pathlib import Path
from typing import Any

import pytest

from guard.errors import ConfigError
from guard.simulate import scenario
from guard.simulate.scenario import Closed, Conversations
from guard.simulate.units import seconds


@pytest.mark.parametrize(
    ("text", "value"), [("200us", 2e-4), ("1.5ms", 1.5e-3), ("2s", 2.0), ("3 min", 180.0), ("1h", 3600.0), (0.25, 0.25)]
)
def test_times_as_people_write_them(text: object, value: float):
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "5", "ms", "-1s", "5 parsecs", None, True, -1, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(text: object):
    with pytest.raises(ValueError, match="is not a time"):
        seconds(text)


def test_every_shipped_scenario_loads_and_has_a_title():
    assert "demo" in scenario.names()
    for name in scenario.names():
        assert scenario.load(name).title


@pytest.mark.parametrize(
    ("data", "key", "problem"),
    [
        ({"link": {"rrt": "1ms"}}, "link.rrt", "no such key"),
        ({"links": {}}, "links", "no such key"),
        ({"link": {"rtt": "fast"}}, "link.rtt", "'fast' is not a time"),
        ({"engine": {"count": 0}}, "engine.count", "greater than or equal to 1"),
        ({"connector": {"kind": "nixl"}}, "connector", "kind: 'nixl' is not one of"),
        ({"link": {"change": [{"at": 1}]}}, "link.change.0", "changes nothing"),
        ({"link": {"change": [{"rtt": "1ms"}]}}, "link.change.0.at", "Field required"),
        ({"link": {"change": [{"at": 1, "rtt": 1, "for": 9, "every": 5}]}}, "link.change.0", "every: must be"),
        ({"link": {"change": [{"at": 1, "loss": 1, "engines": [7]}]}}, "scenario", "link.change.0.engines"),
        ({"workload": {"kind": "trace"}}, "workload.trace.path", "Field required"),
        ({"workload": {"kind": "poisson"}}, "workload", "poisson"),
        ({"workload": {"rate": -1}}, "workload.conversations.rate", "greater than 0"),
        ({"objective": {"percentile": 95}}, "objective.percentile", "less than 1"),
        ({"seconds": True}, "seconds", "not a time"),
    ],
)
def test_a_bad_key_is_named_with_what_is_wrong(data: dict[str, Any], key: str, problem: str):
    with pytest.raises(ConfigError) as caught:
        scenario.parse(data)
    assert caught.value.key == key
    assert problem in caught.value.problem


def test_files_that_are_none_are_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no such file or scenario; there are .*demo"):
        scenario.load("nothing")
    bad = tmp_path / "bad.toml"
    bad.write_text("link = [", "utf-8")
    with pytest.raises(ConfigError, match="not TOML"):
        scenario.load(str(bad))


def test_a_trace_beside_its_file_is_found(tmp_path: Path):
    file = tmp_path / "one.toml"
    file.write_text('[workload]\nkind = "trace"\npath = "trace.csv"\n', "utf-8")
    workload = scenario.load(str(file)).workload
    assert isinstance(workload, scenario.Trace)
    assert workload.path == tmp_path / "trace.csv"


def test_a_workload_grows_with_its_engines():
    assert scenario.scaled(Conversations(rate=4, users=80), 2.0) == Conversations(rate=8, users=160)
    assert scenario.scaled(Closed(kind="closed", concurrency=8, prompt_tokens=1), 0.5).concurrency == 4  # type: ignore[union-attr]
