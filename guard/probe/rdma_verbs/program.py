"""The commands of the program: `check`, `measure` (requests on standard input, answers on standard output), `serve`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from typing import Any

from . import layout
from .control import DEFAULT_PORT
from .session import Session
from .target import Target, stop_on_signals
from .trouble import VERBS, Trouble

MAX_COUNT = 10_000
OVERTIME_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Runs one command; 0 done, 1 failed (the reason is the last line), 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="rdma_verbs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="whether pyverbs loads here, and which devices there are")
    commands.add_parser("measure", help='one JSON request a line: {"host", "port", "count", "timeout", "budget", ...}')
    serve = commands.add_parser("serve", help="be the passive target of probes")
    serve.add_argument("--device", required=True)
    serve.add_argument("--bind", default="0.0.0.0")  # noqa: S104 - the other end is another host by nature
    serve.add_argument("--port", type=int, default=DEFAULT_PORT)
    serve.add_argument("--gid-index", type=int)
    serve.add_argument("--sessions", type=int, default=32)
    options = parser.parse_args(arguments)
    try:
        verbs = layout.load()
        if options.command == "check":
            _say({"ok": True, "python": sys.version.split()[0], "layout": verbs.layout, **_devices(verbs)})
        elif options.command == "measure":
            _measure(verbs)
        else:
            Target(
                verbs, options.device, bind=options.bind, port=options.port, gid_index=options.gid_index,
                sessions=options.sessions, say=_say,
            ).run(stop_on_signals())  # fmt: skip
    except Trouble as trouble:
        _say(trouble.as_dict())
        return 1
    except BrokenPipeError:  # whoever asked is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


def _devices(verbs: layout.Verbs) -> dict[str, Any]:
    try:
        return {"devices": [layout.name_of(device) for device in verbs.devices()]}
    except Trouble as trouble:
        return {"devices": [], "problem": trouble.message}


def _measure(verbs: layout.Verbs) -> None:
    """Answers requests until standard input ends. The session is kept from one to the next while it works."""
    _say({"ok": True, "layout": verbs.layout})
    gc.freeze()
    session: Session | None = None
    opened: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        wanted = {key: request[key] for key in ("host", "port", "device", "gid_index", "source", "event")}
        count, timeout = min(int(request["count"]), MAX_COUNT), float(request["timeout"])
        budget = float(request["budget"])
        # Nothing here may outlive its caller's patience, even inside the library: the alarm ends the process.
        signal.setitimer(signal.ITIMER_REAL, budget + OVERTIME_SECONDS)
        end = time.perf_counter() + budget
        rtts: list[float] = []
        sent = 0
        try:
            if session is not None and opened != wanted:
                session.close()
                session = None
            if session is None:
                session, opened = Session(verbs, seconds=budget, **wanted), wanted
            for _ in range(count):
                sent += 1
                seconds = session.read(max(0.0, min(timeout, end - time.perf_counter())))
                if seconds is not None:
                    rtts.append(seconds)
            facts = {"device": session.device, "transport": session.transport, "gid": session.gid}
            _say({"ok": True, "rtts": rtts, "sent": sent, **facts})
        except Trouble as trouble:
            _say({**trouble.as_dict(), "rtts": rtts, "sent": sent})
            _drop(session)
            session = None
        except verbs.error as error:
            _say({**Trouble(VERBS, str(error)).as_dict(), "rtts": rtts, "sent": sent})
            _drop(session)
            session = None
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    _drop(session)


def _drop(session: Session | None) -> None:
    if session is not None:
        session.close()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
