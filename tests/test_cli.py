"""The command line against a real service, and what it says when things are wrong."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from guard import __version__
from guard.cli import show
from guard.cli.app import app
from guard.cli.options import duration
from tests.service.conftest import polled

CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "guard.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=CLEAN | env, timeout=60)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    command = [sys.executable, "-m", "guard.cli", "serve", "--port", "0", "--state-dir", str(state)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=CLEAN) as process:
        assert process.stderr is not None
        found = ""
        for line in process.stderr:
            with contextlib.suppress(ValueError, KeyError):
                found = json.loads(line)["url"]
                break
        yield found
        process.terminate()
        process.stderr.read()
        process.wait(15)


def hook(url: str, engine: str) -> None:
    """A hook that polls, applies and says so."""
    path = f"{url}/v1/directives/{engine}?wait=0&backend=a/b&model=org/m&hook=0.1.0"
    tag = httpx2.get(path).headers["etag"]
    assert httpx2.get(path, headers={"If-None-Match": tag}).status_code == 304


def test_switch_see_and_clear(url: str) -> None:
    done = invoke("offload", "off", "--scope", "engine:x/9", "--reason", "why not", "--ttl", "10m", "--no-stores",
                  "--endpoint", url)  # fmt: skip
    assert (done.exit_code, done.stdout) == (
        0,
        "engine:x/9: off; no live engine is in this scope now: it holds for those that come\n",
    )
    override = json.loads(invoke("status", "--endpoint", url, "--json").stdout)["overrides"][0]
    assert (override["scope"], override["mode"], override["stores"], override["reason"]) == (
        "engine:x/9", "off", False, "why not",
    )  # fmt: skip
    assert 590 < override["ttl_seconds"] <= 600
    text = invoke("status", "--endpoint", url).stdout
    told = json.loads(invoke("status", "--endpoint", url, "--json").stdout)["headline"]
    assert text.startswith(f"{told['title']}\n  {told['why']}\n")  # what the console says too
    assert re.search(r"engine:x/9 +off +no +\d+\.\d min", text)
    done = invoke("offload", "clear", "--scope", "engine:x/9", "--endpoint", url)
    assert (done.exit_code, done.stdout) == (0, "engine:x/9: cleared; no live engine is in this scope now\n")
    history = json.loads(invoke("offload", "history", "--scope", "engine:x/9", "--endpoint", url, "--json").stdout)
    assert [item["action"] for item in history["switches"]] == ["clear", "set"]
    assert "why not" in invoke("offload", "history", "--endpoint", url).stdout


@pytest.mark.parametrize("mode", ["on", "auto", "observe"])
def test_the_other_modes(url: str, mode: str) -> None:
    done = invoke("offload", mode, "--scope", "model:org/other", "--endpoint", url, "--json")
    assert (done.exit_code, json.loads(done.stdout)["override"]["mode"]) == (0, mode)


def test_an_engine_that_has_not_applied_it_makes_the_command_fail(url: str) -> None:
    hook(url, "late/0")
    done = invoke("offload", "off", "--scope", "engine:late/0", "--wait", "0.1", "--endpoint", url)
    assert done.exit_code == 1
    assert done.stdout == "engine:late/0: off; 0 of 1 live engines have applied it; not yet: late/0\n"
    hook(url, "late/0")
    row = next(line for line in invoke("status", "--endpoint", url).stdout.splitlines() if line.startswith("late/0"))
    assert row.split()[:6] == ["late/0", "a/b", "off", "engine:late/0", "bypass", "acknowledged"]


def test_nobody_there() -> None:
    done = run("status", "--endpoint", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot reach the service at http://127.0.0.1:9" in done.stderr
    assert "kvguard serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_endpoint_comes_from_the_environment(url: str) -> None:
    assert run("status", KVGUARD_ENDPOINT=f"{url},http://127.0.0.1:9").returncode == 0


def test_an_unknown_request(url: str) -> None:
    done = run("explain", "nobody", "--endpoint", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no request 'nobody'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--endpoint", "127.0.0.1:1"], "is not a URL"),
        (["status", "--token-file", "/no/such"], "token file /no/such"),
        (["offload", "off", "--ttl", "soon"], "is not a time"),
        (["offload", "off", "--on-lease-expiry", "maybe"], "is not one of 'keep', 'open'"),
        (["completion", "tcsh"], "is not one of 'bash', 'zsh', 'fish'"),
        (["offload", "maybe"], "No such command"),
        (["config", "--config", "/no/such"], "config: /no/such: No such file"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in re.sub(r"\s+", " ", done.stderr.replace("│", ""))


def test_a_scope_that_is_none(url: str) -> None:
    done = run("offload", "off", "--scope", "pod:x", "--endpoint", url)
    assert (done.returncode, "is not a scope" in done.stderr) == (2, True)


@pytest.mark.parametrize("scope", ["engine:x/../fleet", "engine:x/./0", "model:org/m"])
def test_dots_in_a_scope_do_not_lead_to_another_one(url: str, scope: str) -> None:
    def switched() -> set[str]:
        return {item["scope"] for item in httpx2.get(f"{url}/v1/offload").json()["overrides"]}

    before = switched()
    done = run("offload", "off", "--scope", scope, "--wait", "0", "--json", "--endpoint", url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scope"] == scope
    assert switched() - before == {scope}
    assert run("offload", "clear", "--scope", scope, "--endpoint", url).returncode == 0


def test_who_calls_under_a_name_that_is_not_allowed_is_not_sent_for_a_token(url: str) -> None:
    done = run("status", "--endpoint", url.replace("127.0.0.1", "127.1"))
    assert done.returncode != 0
    assert "host '127.1' is not this machine" in done.stderr
    assert "allowed_hosts" in done.stderr
    assert "use a token" not in done.stderr


def test_an_empty_state_dir_is_not_the_working_directory(tmp_path: Path) -> None:
    done = run("serve", "--port", "0", "--state-dir", "")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, "kvguard: state_dir: names no directory, got '' (--state-dir)",
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_experiment_that_is_ended_puts_the_switch_back(url: str, number: signal.Signals) -> None:
    scope = f"model:org/{number.name}"
    assert run("offload", "observe", "--scope", scope, "--reason", "mine", "--endpoint", url).returncode == 0
    command = [sys.executable, "-m", "guard.cli", "experiment", "--scope", scope, "--endpoint", url]
    with polled(url, f"e/{number.name}", f"org/{number.name}", "b"):
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=CLEAN) as process:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("block 1 of 20")
            process.send_signal(number)
            process.communicate(timeout=30)
        overrides = {item["scope"]: item for item in httpx2.get(f"{url}/v1/offload").json()["overrides"]}
        assert (overrides[scope]["mode"], overrides[scope]["reason"]) == ("observe", "mine")
        assert run("offload", "clear", "--scope", scope, "--endpoint", url).returncode == 0


def test_figures_that_a_filter_hides_are_not_called_missing(url: str) -> None:
    asked = run("inflection", "--model", "nope", "--endpoint", url)
    assert asked.stdout.startswith("nothing was estimated for model nope;")
    assert "nothing was estimated for backend nope yet" in run("advise", "--backend", "nope", "--endpoint", url).stderr


def test_config_shows_value_and_source(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("max_engines = 5\n")
    done = run("config", "--config", str(file), "--json", KVGUARD_SERVE_PORT="1234")
    data = json.loads(done.stdout)
    assert (data["port"], data["max_engines"]) == (
        {"value": 1234, "source": "environment"}, {"value": 5, "source": "file"},
    )  # fmt: skip
    assert re.search(r"port +1234 +environment", run("config", KVGUARD_SERVE_PORT="1234").stdout)


def test_version() -> None:
    assert invoke("version").stdout == f"kvguard {__version__}\n"
    assert json.loads(invoke("version", "--json").stdout)["version"] == __version__


def test_help_needs_no_heavy_imports() -> None:
    code = (
        "import sys\nfrom guard.cli.app import app\n"
        "heavy = {'fastapi', 'pydantic', 'polars', 'numpy', 'httpx2', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_demo_runs_shows_simulated_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "guard.cli", "demo", "--duration", "9"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90,
                          env=CLEAN | {"TMPDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("simulated ")]
    assert any(re.search(r"mode=auto .*state=open hook=acknowledged .*TTFT p50=\d", row) for row in rows), done.stdout
    url = re.search(r"http://\S+", done.stdout)
    assert url
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-u", "-m", "guard.cli", "demo"]
    env = CLEAN | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert "kvguard demo at" in process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in errors) == (0, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 s"), (12.3, "12.3 s"), (1.234, "1.23 s"), (0.0456, "45.6 ms"), (0.000789, "789 us")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert show.seconds(value) == text


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("1d", 86400)])
def test_duration(text: str, value: float) -> None:
    assert duration(text) == value
