"""What the doctor found: one thing each, how bad it is, and what to do."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """`problem`: the hook will not do its work. `warning`: it will, but less or not safely. `note`: good to know."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names what was looked at, `hint` says what to do."""

    check: str
    level: Level
    message: str
    hint: str = ""


def ok(check: str, message: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, message)


def note(check: str, message: str, hint: str = "") -> Finding:
    """Good to know."""
    return Finding(check, Level.NOTE, message, hint)


def warning(check: str, message: str, hint: str = "") -> Finding:
    """It works, but less well or not safely."""
    return Finding(check, Level.WARNING, message, hint)


def problem(check: str, message: str, hint: str = "") -> Finding:
    """It does not work like this."""
    return Finding(check, Level.PROBLEM, message, hint)
