"""Every command says what it does, how it ends and what to type."""

import pytest
import typer.main
from typer.testing import CliRunner

from guard.cli import show
from guard.cli.app import app

ROOT = typer.main.get_command(app)
WITHOUT_JSON = {"serve", "demo", "completion"}
"""They run until they are stopped, or print what a program reads already."""


def commands(group, *path):
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


ALL = list(commands(ROOT))


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_help_and_json(path, command):
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert len((command.help or "").strip()) > 15
    options = {option for parameter in command.params for option in parameter.opts}
    assert ("--json" in options) != (path[-1] in WITHOUT_JSON)
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{parameter.name} has no help"


def test_the_first_page_tells_exit_status_and_environment():
    text = CliRunner().invoke(app, ["--help"]).stdout
    for words in ("Exit status 0 done, 1", "KVGUARD_ENDPOINT", "--json", "completion bash"):
        assert words in " ".join(text.split())


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["offload", "off", "--wait", "soon"], ["explain"], ["sweep", "--ca-file", "/no/such.pem"]],
)
def test_wrong_usage_is_2(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("width", "left"), [(200, ["name", "a", "b", "why"]), (22, ["name", "b", "why"]), (9, ["name", "why"])]
)
def test_a_narrow_terminal_goes_without_some_columns(width, left):
    out = show.Console(width=width)
    rows = [("engine", "aaaaaaaa", "bb", "x" * 5)]
    made = show.fitting(out, ("name", "a", "b", "why"), rows, ("a", "b"))
    assert [column.header for column in made.columns] == left
