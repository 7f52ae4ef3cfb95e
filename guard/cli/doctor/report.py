"""Prints the findings, and is the whole command where typer is not installed: `python -m guard.cli doctor`."""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

from guard.cli.doctor import examine, process
from guard.cli.doctor.findings import Finding, Level
from guard.errors import ConfigError

SIGNS: Final = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}
_COLOURS: Final = {Level.OK: "32", Level.NOTE: "2", Level.WARNING: "33", Level.PROBLEM: "31;1"}
_INDENT: Final = 26


def report(findings: Sequence[Finding], *, as_json: bool, out: TextIO = sys.stdout) -> int:
    """Prints them; returns the exit status: 1 when there is a problem, else 0."""
    bad = sum(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        out.write(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in findings]}, indent=2) + "\n")
        return 1 if bad else 0
    colour = out.isatty() and not os.environ.get("NO_COLOR")
    width = max(60, shutil.get_terminal_size((120, 24)).columns) if out.isatty() else 10_000
    for finding in findings:
        sign = SIGNS[finding.level].ljust(8)
        if colour:
            sign = f"\x1b[{_COLOURS[finding.level]}m{sign}\x1b[0m"
        out.write(f"{sign} {finding.check:<16} {_wrapped(finding.message, width)}\n")
        if finding.hint:
            out.write(" " * _INDENT + _wrapped(f"→ {finding.hint}", width) + "\n")
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    out.write(f"\n{_count(bad, 'problem')}, {_count(warnings, 'warning')}\n")
    return 1 if bad else 0


def main(arguments: Sequence[str]) -> int:
    """`kvguard doctor` with the standard library alone; the options are those of `kvguard doctor --help`."""
    own, command = _split(arguments)
    parser = argparse.ArgumentParser("kvguard doctor", description="Find what would keep the hook from working.")
    parser.add_argument("--python", default="", help="vLLM's interpreter")
    parser.add_argument("--pid", type=int, help="a running vLLM, by its process id")
    parser.add_argument("--engine", default="", help="URL of a running vLLM")
    parser.add_argument("--endpoint", default="", help="URL of the service [KVGUARD_ENDPOINT]")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token [KVGUARD_TOKEN_FILE]")
    parser.add_argument("--ca-file", type=Path, help="PEM file with authorities to trust [KVGUARD_CA_FILE]")
    parser.add_argument("--offline", action="store_true", help="ask neither service nor engine")
    parser.add_argument("--json", action="store_true", help="JSON")
    known = parser.parse_args(own)
    try:
        return run(
            command, pid=known.pid, python=known.python, engine=known.engine, endpoint=known.endpoint,
            token_file=known.token_file, ca_file=known.ca_file, network=not known.offline, as_json=known.json,
        )  # fmt: skip
    except ConfigError as error:
        parser.error(str(error))


def run(
    command: Sequence[str],
    *,
    pid: int | None,
    python: str,
    engine: str,
    endpoint: str,
    token_file: Path | None,
    ca_file: Path | None,
    network: bool,
    as_json: bool,
) -> int:
    """Examines and prints; returns the exit status.

    Raises:
        ConfigError: there is no process `pid`, or it is somebody else's.
    """
    env: Mapping[str, str] = os.environ
    if pid is not None:
        try:
            command, env, found = process(pid)
        except OSError as error:
            problem = "no such process" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            raise ConfigError(f"--pid {pid}", problem) from None
        python = python or found
    findings = examine(
        command, env=env, python=python, engine=engine, endpoint=endpoint, token_file=token_file, ca_file=ca_file,
        network=network, here=bool(command or python or not engine),
    )  # fmt: skip
    return report(findings, as_json=as_json)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is ours, and vLLM's command line behind `--`."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def _wrapped(text: str, width: int) -> str:
    return ("\n" + " " * _INDENT).join(textwrap.wrap(text, width - _INDENT, break_on_hyphens=False) or [""])


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
