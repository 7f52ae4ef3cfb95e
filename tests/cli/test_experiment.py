"""`kvguard experiment` against a real service: what was in force comes back, unless somebody else has switched."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.service.conftest import clean_env, polled, serve  # noqa: F401  a fixture

FLEET = "/v1/offload/fleet"
Serve = Callable[..., Any]


def start(url: str, block: str, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "guard.cli", "experiment", "--endpoint", url, "--pairs", "3", "--block", block,
        "--washout", "0.1s", "--seed", "1", *options,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env())


def overrides(client: httpx2.Client) -> list[tuple[str, str]]:
    return [(item["mode"], item["reason"]) for item in client.get("/v1/offload").json()["overrides"]]


@pytest.mark.parametrize("before", [None, {"mode": "observe", "reason": "INC-1", "ttl_seconds": 600}])
def test_what_was_in_force_comes_back(serve: Serve, before: dict[str, Any] | None) -> None:  # noqa: F811
    with httpx2.Client(base_url=serve().url) as client, polled(str(client.base_url), "e/0", "m", "b"):
        if before:
            client.put(FLEET, json=before).raise_for_status()
        with start(str(client.base_url), "0.2s") as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, "block 6 of 6" in err) == (0, True), err
        assert "insufficient data" in out
        assert overrides(client) == ([("observe", "INC-1")] if before else [])
        if before:
            left = client.get(FLEET).json()["ttl_seconds"]
            assert 500 < left < 600


def test_a_switch_of_somebody_else_ends_it_and_stands(serve: Serve) -> None:  # noqa: F811
    url = serve().url
    with httpx2.Client(base_url=url) as client, polled(url, "e/0", "m", "b"), start(url, "3s") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("block 1 of 6")
        client.put(FLEET, json={"mode": "off", "reason": "INC-2: the store is down"}).raise_for_status()
        _, err = process.communicate(timeout=60)
        assert "stopped: somebody else has switched fleet, which stands" in err
        assert "block 2" not in err
        assert overrides(client) == [("off", "INC-2: the store is down")]


@pytest.mark.parametrize("scope", ["fleet", "model:other", "backend:other", "engine:e/1"])
def test_without_an_engine_in_scope_nothing_is_switched(serve: Serve, scope: str) -> None:  # noqa: F811
    with httpx2.Client(base_url=serve().url) as client, contextlib.ExitStack() as stack:
        if scope != "fleet":
            stack.enter_context(polled(str(client.base_url), "e/0", "m", "b"))
        with start(str(client.base_url), "0.2s", "--scope", scope) as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        assert f"no live engine is in scope {scope}" in err
        assert client.get("/v1/offload/history").json()["switches"] == []


@pytest.mark.parametrize("scope", ["model:m", "backend:b", "engine:e/0"])
def test_an_engine_in_scope_is_enough(serve: Serve, scope: str) -> None:  # noqa: F811
    with httpx2.Client(base_url=serve().url) as client, polled(str(client.base_url), "e/0", "m", "b"):
        with start(str(client.base_url), "0.2s", "--scope", scope) as process:
            _, err = process.communicate(timeout=60)
        assert (process.returncode, "block 6 of 6" in err) == (0, True), err
