"""The `kvguard` command. Heavy imports happen inside the commands, so that it starts fast."""

import sys


def main() -> None:
    """Runs the command line: status 0 done, 1 it failed, 2 wrong usage or settings."""
    try:
        from guard.cli.app import app
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"]:  # made for vLLM's environment, where only the hook is installed
            from guard.cli.doctor.report import main as doctor

            sys.exit(doctor(sys.argv[2:]))
        sys.stderr.write(f"kvguard: {error.name} is missing: pip install 'kvguard[service]'\n")
        sys.exit(1)
    from typer.completion import completion_init  # type: ignore[attr-defined]  # not re-exported by name

    completion_init()  # else `completion` prints scripts that nobody answers
    app(prog_name="kvguard")


__all__ = ["main"]
