"""Forty minutes of a planted fleet in a real Prometheus, made at once: a link degrades, the guard acts, it heals."""

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from alerts import __main__ as generate
from alerts.planted import Fleet
from alerts.servers import Prometheus, prometheus

MINUTES = 40
STEP = 15
_HOST = 'instance="kvguard:8420",job="kvguard"'


def story(fleet: Fleet, minute: float) -> None:
    """What happens when. RTT climbs over both points and heals; an operator switches; a store stalls; a hook drops."""
    a, b = fleet.backends.values()
    a.rtt = 0.0003 if minute < 8 else min(0.012, 0.0003 * 1.45 ** (minute - 8)) if minute < 26 else 0.0004
    b.rtt = 0.0004 + 0.0001 * (1 + (minute % 10) / 10)
    a.stalled = 20.0 if 20 <= minute < 22 else 0.0
    b.probes_failing = 0.3 if 30 <= minute < 32 else 0.0
    fleet.engines[1].mode = "off" if 32 <= minute < 36 else "auto"
    fleet.engines[3].dropping = 4.0 if 28 <= minute < 29 else 0.0
    fleet.engines[2].age = 40.0 if 34 <= minute < 35 else 1.0 + (minute % 4)
    fleet.rate = 3.0 + 1.5 * (10 <= minute < 24)
    for engine in fleet.engines:
        engine.queue = 0.15 if 12 <= minute < 15 else 0.02


def openmetrics(end: float) -> Iterator[str]:
    """The scrapes of the story, the last one at `end` (Unix seconds), with their times."""
    fleet = Fleet(now=end - MINUTES * 60 - 0.001)
    fleet.grow()
    for number in range(MINUTES * 60 // STEP + 1):
        story(fleet, number * STEP / 60)
        fleet.step(STEP if number else 0.001)
        at = f"{end - MINUTES * 60 + number * STEP:.3f}"
        for line in fleet.telemetry.render().decode().splitlines():
            if not line.startswith("#"):
                yield f"{_scraped(line)} {at}"
        for line in fleet.vllm_lines():
            yield f"{line} {at}"
        yield f"up{{{_HOST}}} 1 {at}"
    yield "# EOF"


def _scraped(line: str) -> str:
    """A line with the labels that the scrape adds."""
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{_HOST},{rest}"
    return re.sub(r" ", f"{{{_HOST}}} ", line, count=1)


@contextlib.contextmanager
def server(directory: Path) -> Iterator[tuple[Prometheus, float]]:
    """Prometheus over the story, recording rules included; yields it and the story's end in Unix seconds."""
    end = float(int(time.time()) // STEP * STEP)
    source, data = directory / "story.om", directory / "tsdb"
    source.write_text("\n".join(openmetrics(end)) + "\n")
    _promtool("create-blocks-from", "openmetrics", str(source), str(data))
    rules = directory / "rules.yml"
    rules.write_text(generate.dump(generate.rules()))
    config = directory / "prometheus.yml"
    config.write_text("global: {scrape_interval: 15s}\n")
    fresh = "--query.lookback-delta=20s"  # planted series end without the marker that a scrape leaves
    with prometheus(config, data, fresh) as (found, _):
        span = (f"--start={end - MINUTES * 60:.0f}", f"--end={end:.0f}", "--eval-interval=15s")
        _promtool("create-blocks-from", "rules", *span, f"--url={found.url}", f"--output-dir={data}", str(rules))
    with prometheus(config, data, fresh) as (found, _):  # anew, to see what was written meanwhile
        yield found, end


def _promtool(*arguments: str) -> None:
    result = subprocess.run(["promtool", "tsdb", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"promtool tsdb {arguments[0]} {arguments[1]}: {result.stderr[-500:]}")
