"""Simulated traffic for a service that runs elsewhere: `python -m guard.simulate --endpoint URL --token-file FILE`."""

import argparse
import signal
import threading
from pathlib import Path

from guard.errors import ConfigError
from guard.simulate import traffic


def main() -> None:
    """Sends traffic until SIGTERM, SIGINT or the end of `--duration`."""
    parser = argparse.ArgumentParser(prog="python -m guard.simulate", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="URL of the service")
    parser.add_argument("--token-file", type=Path, help="bearer token with scope ingest")
    parser.add_argument("--script", help="scenario (TOML), or one that comes with kvguard [demo]")
    parser.add_argument("--engines", type=int, help="simulated engines")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster the script runs")
    parser.add_argument("--duration", type=float, help="seconds; without it until stopped")
    given = parser.parse_args()
    stop = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stop.set())
    try:
        scenario = traffic.script(given.script, given.engines)
    except ConfigError as error:
        parser.error(str(error))
    traffic.run(
        given.endpoint,
        scenario,
        speed=given.speed,
        duration=given.duration,
        stop_event=stop,
        token_file=given.token_file,
    )


if __name__ == "__main__":
    main()
