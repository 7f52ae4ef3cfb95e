"""The lab's command line."""

import argparse
import os
import signal
import sys
from pathlib import Path

from lab import env, netns
from lab.config import CONNECTORS, INJECTORS
from lab.errors import LabError
from lab.injector.control import Injector

CURRENT = env.cache_dir() / "current"
"""Link to the newest run's directory, by which `lab injector` and `lab exec` find it."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m lab", description="Real vLLM, LMCache and Redis with a slow link.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="build what the lab runs on")
    run = commands.add_parser("run", help="start everything, drive a mixed load, print the table, stop everything")
    run.add_argument("--connector", choices=[name for name in CONNECTORS if name != "none"], default="lmcache-mp")
    run.add_argument("--injector", choices=[kind for kind in INJECTORS if kind != "none"], default="auto")
    run.add_argument("--rtts", default="0,1,5,20,50", help="added round-trip times, ms (default %(default)s)")
    run.add_argument("--quick", action="store_true", help="fewer and shorter prompts")
    run.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    bench = commands.add_parser("bench", help="cost of the hook: paired blocks on one engine, with and without it")
    bench.add_argument("--blocks", type=int, default=320, help="paired blocks; a result needs 30 (default %(default)s)")
    sweep = commands.add_parser("sweep", help="kvguard sweep on the lab: latency tiers x concurrency, and its report")
    sweep.add_argument("--out", type=Path, default=Path("kvguard-sweep"), help="directory (default %(default)s)")
    commands.add_parser("test", help="pytest on tests/lab; further arguments go to pytest", add_help=False)
    inject = commands.add_parser("injector", help="one command to the running lab's injector: rtt 5000, bw 1000, stats")
    inject.add_argument("--commands", action="store_true", help="to the command proxy instead: delay GET 2000")
    inject.add_argument("words", nargs="+")
    commands.add_parser("exec", help="a command inside the running lab's network namespace", add_help=False)
    passed_on = arguments[:1] in (["test"], ["exec"])  # all that follows is another program's, options too
    options = parser.parse_args(arguments[:1] if passed_on else arguments)
    if passed_on:
        options.words = arguments[1:]
    for number in (signal.SIGTERM, signal.SIGINT):  # SIGINT too: a shell starts background jobs with it ignored
        signal.signal(number, _interrupt)
    try:
        return _dispatch(options, arguments)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; everything is stopped", file=sys.stderr)
        return 130


def _dispatch(options: argparse.Namespace, arguments: list[str]) -> int:
    match options.command:
        case "env":
            built = env.build()
            print(f"vLLM environment: {built.vllm}\nmodel: {built.model}\ncollector: {built.rotel}")
        case "run" | "bench" | "sweep" | "test":
            with env.alone():
                return _on_the_stack(options, arguments)
        case "injector":
            name = "commands.sock" if options.commands else None
            control = Injector(_control(name))
            for key, value in control.send(" ".join(options.words)).items():
                print(f"{key}={value}")
        case "exec":
            pid = (CURRENT / "pid").read_text().strip() if (CURRENT / "pid").exists() else None
            if pid is None or not Path(f"/proc/{pid}").exists():
                raise LabError("no lab is running (python -m lab run --keep)")
            words = options.words[1:] if options.words[:1] == ["--"] else options.words
            os.execvp("nsenter", ["nsenter", f"--net=/proc/{pid}/ns/net", *words])  # noqa: S606 - takes our place
    return 0


def _on_the_stack(options: argparse.Namespace, arguments: list[str]) -> int:
    built = env.build()
    _enter_namespace(options, arguments)
    match options.command:
        case "run":
            from lab.run import run

            run(options, built, CURRENT)
        case "bench":
            from lab.bench import bench

            return 0 if bench(options.blocks, built) or options.blocks < 30 else 1
        case "sweep":
            from lab.sweep import sweep

            return sweep(options.out, built)
        case "test":
            os.environ["KVGUARD_LAB"] = "1"
            import pytest

            os.chdir(env.ROOT)
            named = any(Path(word.partition("::")[0]).exists() for word in options.words)
            return int(pytest.main([*([] if named else ["tests/lab"]), "-m", "lab", *options.words]))
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _enter_namespace(options: argparse.Namespace, arguments: list[str]) -> None:
    """Goes on inside the lab's namespace; where that cannot be, says why and goes on without."""
    if netns.inside() or getattr(options, "injector", "auto") == "proxy":
        return
    why = netns.enter(arguments)
    print(f"lab: no network namespace here ({why}); using loopback and the TCP proxy", file=sys.stderr)


def _control(name: str | None) -> Path:
    candidates = [name] if name else ["tundelay.sock", "link.sock"]
    for candidate in candidates:
        if (CURRENT / candidate).exists():
            return CURRENT / candidate
    raise LabError("no lab is running with such an injector (python -m lab run --keep)")
