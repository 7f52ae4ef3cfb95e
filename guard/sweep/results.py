"""What a sweep has measured so far, in a directory: cut off and started again, it goes on where it was."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from guard.errors import SweepError
from guard.sweep.plan import Cell, Plan

CELLS: Final = "cells.jsonl"
PLAN: Final = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. `ttft` is the client's, the parts are the hook's, in seconds; tokens as the hook counted them."""

    ttft: float
    hook_ttft: float
    prompt: int
    local: int
    loaded: int
    lookup: float
    slot: float
    fetch: float
    prefill: float
    round_trips: int | None
    decision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One finished cell: its samples on the wanted road, how many took another one, and the RTT seen meanwhile."""

    cell: Cell
    samples: tuple[Sample, ...]
    strays: int
    rtt: float | None
    at: float


class Results:
    """The directory of one sweep.

    Raises:
        SweepError: it holds the results of another plan, or cannot be written.
    """

    def __init__(self, directory: Path, plan: Plan, facts: Mapping[str, Any]) -> None:
        self.directory = directory
        self.cells: dict[str, Measured] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open(plan, facts)
        except OSError as error:
            raise SweepError(f"{directory}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise SweepError(f"{directory} does not hold a sweep's results ({error}): name another --out") from None

    def add(self, measured: Measured) -> None:
        """Keeps a finished cell, on disk before this returns."""
        with (self.directory / CELLS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.cells[measured.cell.key] = measured

    def _open(self, plan: Plan, facts: Mapping[str, Any]) -> None:
        path = self.directory / PLAN
        wanted = plan.fingerprint()
        if path.exists():
            held = json.loads(path.read_text("utf-8"))
            if held["fingerprint"] != wanted:
                raise SweepError(
                    f"{self.directory} holds a sweep with another plan: name another --out, or give the same options"
                )
        else:
            path.write_text(json.dumps({"fingerprint": wanted, "plan": asdict(plan), **facts}, indent=2) + "\n")
        self.facts = json.loads(path.read_text("utf-8"))
        path = self.directory / CELLS
        if path.exists():
            text = path.read_text("utf-8")
            whole = text[: text.rfind("\n") + 1]  # a run that was cut off may have left half a line
            if whole != text:
                path.write_text(whole, "utf-8")
            self.cells = {found.cell.key: found for found in map(_measured, map(json.loads, whole.splitlines()))}


def load(directory: Path) -> tuple[dict[str, Any], list[Measured]]:
    """The plan with its facts, and the cells of a sweep.

    Raises:
        SweepError: there is none in the directory.
    """
    try:
        facts: dict[str, Any] = json.loads((directory / PLAN).read_text("utf-8"))
        lines = (directory / CELLS).read_text("utf-8").splitlines()
        return facts, [_measured(json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SweepError(f"no results of a sweep in {directory}: {error}") from None


def _measured(data: dict[str, Any]) -> Measured:
    return Measured(
        cell=Cell(**data["cell"]),
        samples=tuple(Sample(**sample) for sample in data["samples"]),
        strays=data["strays"],
        rtt=data["rtt"],
        at=data["at"],
    )
