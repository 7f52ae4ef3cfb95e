"""Spans per CPU-second of the service: decode and join over HTTP, beside rotel (Rust) swallowing the same bodies.

Both run as they come, one process each, on loopback, one after the other; the bodies go in over one kept-open
connection, uncompressed. CPU time is what the kernel charges the process (all its threads, user and system) from the
first measured body until it has settled, so the HTTP server, the event loop and the service's ticks are in it. kvguard
must show on `/metrics` that it took every span and joined every request. rotel decodes, batches and drops
(`--exporter blackhole`): it joins nothing, so the ratio is against less work.
"""

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from benchmarks.payload import MIXES, Payload, build
from benchmarks.server import cpu_seconds, free_port, running, service

GOAL = 100_000
SPANS = int(os.environ.get("KVGUARD_BENCH_SPANS", "60000"))
WARM_UP = 12_000
REQUIREMENTS = Path(__file__).parent.parent / "requirements" / "bench.txt"


def main() -> int:
    """Prints the table; 1 when kvguard misses the goal in any row."""
    print(
        f"ingest: spans per CPU-second over HTTP, {SPANS} spans a row in bodies of about 500, goal {GOAL} for kvguard"
    )
    for mix, what in MIXES.items():
        print(f"  {mix}: {what}")
    print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; a busy machine lowers both figures")
    agent = rotel_agent()
    print(f"{'mix':<12}{'encoding':<12}{'bytes/span':>11}{'kvguard':>11}{'rotel':>11}{'ratio':>8}  goal")
    missed = False
    for mix in MIXES:
        warm = build(mix, WARM_UP, time.time_ns(), seed=1)
        full = build(mix, SPANS, time.time_ns(), seed=2)
        for kind, payload in full.items():
            ours = _kvguard(warm[kind], payload)
            theirs = _rotel(agent, warm[kind], payload) if agent else None
            met = ours >= GOAL
            missed = missed or not met
            size = sum(map(len, payload.bodies)) / payload.spans
            beside = f"{theirs:>11,.0f}{ours / theirs:>8.2f}" if theirs else f"{'-':>11}{'-':>8}"
            row = f"{mix:<12}{kind.rpartition('/')[2]:<12}{size:>11.0f}{ours:>11,.0f}{beside}"
            print(f"{row}  {'met' if met else 'MISSED'}", flush=True)
    return int(missed)


def rotel_agent() -> Path | None:
    """Rotel's binary out of its wheel, in a cached environment of its own; None, and why, where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvguard"
    home = cache / f"bench-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    found = next(home.glob("lib/python*/site-packages/rotel/rotel-agent"), None)
    if found is not None:
        return found
    try:
        venv.create(home, with_pip=True, clear=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "-r", str(REQUIREMENTS)], check=True, timeout=300)
        return next(home.glob("lib/python*/site-packages/rotel/rotel-agent"))
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        shutil.rmtree(home, ignore_errors=True)
        print(f"  rotel cannot be installed, so there is no comparison: {error}", file=sys.stderr)
        return None


def _kvguard(warm: Payload, payload: Payload) -> float:
    port = free_port()
    with tempfile.TemporaryDirectory() as state, running(service(port, state), port) as process:
        rate = _measure(process.pid, port, warm, payload)
        told = _metrics(port)
        taken = told.get('kvguard_ingest_spans_total{outcome="accepted"}', 0.0)
        joined = sum(value for name, value in told.items() if name.startswith("kvguard_ttft_seconds_count"))
    wanted = (warm.spans + payload.spans, warm.requests + payload.requests)
    if (taken, joined) != wanted:
        raise RuntimeError(f"kvguard took {taken:.0f} spans and joined {joined:.0f} requests of {wanted}")
    return rate


def _rotel(agent: Path, warm: Payload, payload: Payload) -> float:
    port = free_port()
    command = [str(agent), "start", "--exporter", "blackhole", "--otlp-http-endpoint", f"127.0.0.1:{port}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"]
    with running(command, port) as process:
        return _measure(process.pid, port, warm, payload)


def _measure(pid: int, port: int, warm: Payload, payload: Payload) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    _send(connection, warm)
    time.sleep(1.0)  # what is batched or joined later belongs to the warm-up
    before = cpu_seconds(pid)
    _send(connection, payload)
    time.sleep(1.0)
    return payload.spans / (cpu_seconds(pid) - before)


def _send(connection: http.client.HTTPConnection, payload: Payload) -> None:
    for body in payload.bodies:
        connection.request("POST", "/v1/traces", body, {"Content-Type": payload.content_type})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{payload.content_type}: HTTP {response.status} {answer[:200]!r}")


def _metrics(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] not in "#")}
