"""How a command ends when it cannot do its job."""

import sys
from typing import NoReturn

import typer

FAILED = 1
USAGE = 2


class ChangedError(Exception):
    """What was to be written only over a known state is no longer in it."""


def fail(message: str, hint: str = "", *, code: int = FAILED) -> NoReturn:
    """Says what went wrong and what to do about it, on stderr, and ends the command."""
    sys.stderr.write(f"kvguard: {message}\n")
    if hint:
        sys.stderr.write(f"  {hint}\n")
    raise typer.Exit(code)
