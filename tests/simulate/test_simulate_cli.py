import json
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIO = """
title = "small"
seconds = 20
[engine]
count = 1
[workload]
rate = 3.0
"""


def kvguard(*arguments: str, block: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.modules.update({{name: None for name in {block.split()!r}}}); sys.argv[0] = 'kvguard'; "
    program += "from guard.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "simulate", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def small(tmp_path: Path) -> str:
    file = tmp_path / "small.toml"
    file.write_text(SCENARIO, "utf-8")
    return str(file)


def test_json_has_a_row_per_rtt_and_policy_and_says_that_it_is_simulated(small: str):
    done = kvguard(small, "--rtt", "50us,5ms", "--policy", "always,never", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == "simulated"
    assert [(each["rtt"], each["policy"]) for each in found["results"]] == [
        (5e-5, "always"), (5e-5, "never"), (5e-3, "always"), (5e-3, "never"),
    ]  # fmt: skip
    assert all(each["regret"] >= 1.0 for each in found["results"])


def test_the_table_is_labelled_and_a_plot_is_written(small: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    done = kvguard(small, "--policy", "never", "--sla", "500ms", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "SIMULATED, not measured: small; SLA: TTFT <= 500 ms" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_all_that_a_planner_needs(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    file.write_text("\n".join(json.dumps({**row, "timestamp": 1000 * n}) for n in range(20)), "utf-8")
    done = kvguard("--trace", str(file), "--policy", "always", "--rtt", "1ms", "--engines", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["requests"] == 20


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give a scenario ("),
        (("nothing",), "nothing: no such file or scenario"),
        (("demo", "--rtt", "quick"), "--rtt: 'quick' is not a time"),
        (("demo", "--sla", "quick"), "--sla: 'quick' is not a time"),
        (("demo", "--policy", "maybe"), "--policy: 'maybe' is not one of all, always"),
        (("demo", "--engines", "0"), "--engines: give at least 1"),
        (("--trace", "none.csv"), "workload.path: none.csv: No such file"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], problem: str):
    done = kvguard(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_key_is_named(tmp_path: Path):
    file = tmp_path / "bad.toml"
    file.write_text("[link]\nspeed = 9\n", "utf-8")
    done = kvguard(str(file))
    assert (done.returncode, "link.speed: no such key" in done.stderr) == (2, True)


def test_without_matplotlib_a_plot_is_refused_with_the_remedy(small: str, tmp_path: Path):
    done = kvguard(small, "--policy", "never", "--plot", str(tmp_path / "p.png"), block="matplotlib")
    assert done.returncode == 2
    assert "pip install 'kvguard[report]'" in done.stderr
