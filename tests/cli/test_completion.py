"""The shells complete what the scripts of `kvguard completion` say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = f'#!/bin/sh\nexec {sys.executable} -m guard.cli "$@"\n'


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which `kvguard` is this tree's."""
    shim = tmp_path / "kvguard"
    shim.write_text(SHIM)
    shim.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def run(*command: str, **env: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=os.environ | env)
    return done.stdout


def test_bash_completes_commands_and_options(path: str) -> None:
    script = run("kvguard", "completion", "bash", PATH=path)
    call = '_kvguard_completion kvguard; printf "%s\\n" "${COMPREPLY[@]}"'

    def ask(words: str, at: int) -> list[str]:
        line = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={at}; COMPREPLY=(); {call}"
        return sorted(run("bash", "-c", line, PATH=path).split())

    assert ask("kvguard off", 1) == ["offload"]
    assert ask("kvguard offload o", 2) == ["observe", "off", "on"]
    assert ask("kvguard status --js", 2) == ["--json"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_answers_in_their_own_form(path: str, shell: str) -> None:
    script = run("kvguard", "completion", shell, PATH=path)
    assert f"_KVGUARD_COMPLETE=complete_{shell}" in script
    answer = run("kvguard", PATH=path, _KVGUARD_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_ARGS="kvguard off",
                 _TYPER_COMPLETE_FISH_ACTION="get-args")  # fmt: skip
    assert "offload" in answer
    assert "status" not in answer
