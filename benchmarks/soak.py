"""A service at 2,000 LLM requests a second (12,000 spans in OTLP bodies) for minutes: memory, drops, directives, loop.

    python -m benchmarks soak              30 s, as part of `make bench`
    python -m benchmarks.soak --minutes 30 what `make soak` does

The sender keeps to the clock and sends one body after the other; every id of every body is new. Beside it 50 hooks
poll, one client asks for a directive five times a second (its latency is the figure), and the fleet is switched every
10 s. The history is written too.
"""

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field

import httpx2
import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.hooks import Hook
from benchmarks.payload import SPANS_PER_BODY, build
from benchmarks.server import cpu_seconds, free_port, resident_bytes, running, service

RATE = 2000.0
HOOKS = 50
TEMPLATES = 8
GOAL_LATENCY = 0.1
PROTOBUF = "application/x-protobuf"


class Template:
    """A body whose ids can be made new: the first four bytes of each are replaced, the same in all of them."""

    def __init__(self, body: bytes) -> None:
        self._body = np.frombuffer(body, dtype=np.uint8)
        spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
        self.requests = sum(span.name == "kvguard.request" for span in spans)
        self.spans = len(spans)
        ids = {one for span in spans for one in (span.trace_id, span.span_id, span.parent_span_id)} - {b""}
        found = re.finditer(b"|".join(map(re.escape, ids)), body)
        self._ids = np.array([match.start() for match in found])
        self._names = np.array([match.end() for match in re.finditer(b"cmpl-", body)])

    def body(self, number: int) -> bytes:
        """The body with ids made of `number`."""
        data = self._body.copy()
        for index, byte in enumerate(number.to_bytes(4, "big")):
            data[self._ids + index] = byte
        for index, byte in enumerate(b"%08x" % number):
            data[self._names + index] = byte
        return data.tobytes()


@dataclass
class Seen:
    """What the sender and the watchers saw."""

    requests: int = 0
    spans: int = 0
    refused: int = 0
    behind: float = 0.0  # seconds by which the sender was late at the worst
    latencies: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


def main(minutes: float = 0.5) -> int:
    """Prints the figures; 1 when something was lost or directives were late."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        os.environ["KVGUARD_SERVE_HISTORY_DIR"] = place + "/history"
        try:
            with running(service(port, place + "/state"), port) as process:
                return asyncio.run(_play(f"http://127.0.0.1:{port}", process.pid, minutes * 60.0))
        finally:
            del os.environ["KVGUARD_SERVE_HISTORY_DIR"]


async def _play(url: str, pid: int, seconds: float) -> int:
    seen = Seen()
    bodies = build("lmcache-mp", TEMPLATES * SPANS_PER_BODY, time.time_ns(), seed=1)[PROTOBUF].bodies
    templates = [Template(body) for body in bodies]
    tasks = [asyncio.create_task(Hook(url, number).run()) for number in range(HOOKS)]
    before, began = cpu_seconds(pid), time.monotonic()
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        tasks += [asyncio.create_task(_watch(client, pid, seen)), asyncio.create_task(_switch(client))]
        await _send(url, templates, seen, seconds)
        lasted, cpu = time.monotonic() - began, cpu_seconds(pid) - before
        await asyncio.sleep(15.0)  # the watermark
        told = await _metrics(client)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return _report(seen, told, lasted, cpu)


async def _send(url: str, templates: list[Template], seen: Seen, seconds: float) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        began, number = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            template = templates[number % len(templates)]
            due = seen.requests / RATE
            seen.behind = max(seen.behind, now - due)
            if due > now:
                await asyncio.sleep(due - now)
            answer = await client.post("/v1/traces", content=template.body(number), headers={"Content-Type": PROTOBUF})
            seen.refused += answer.status_code != 200 or len(answer.content) > 0
            number += 1
            seen.requests += template.requests
            seen.spans += template.spans


async def _watch(client: httpx2.AsyncClient, pid: int, seen: Seen) -> None:
    """Asks for a directive five times a second; memory and the loop's lag every five seconds."""
    number = 0
    while True:
        began = time.monotonic()
        answer = await client.get("/v1/directives/watch/0", params={"wait": 0, "backend": "a/b"})
        answer.raise_for_status()
        seen.latencies.append(time.monotonic() - began)
        if number % 25 == 0:
            seen.memory.append((time.monotonic(), resident_bytes(pid)))
            seen.lags.append((await _metrics(client))["kvguard_control_loop_lag_seconds"])
        number += 1
        await asyncio.sleep(0.2)


async def _switch(client: httpx2.AsyncClient) -> None:
    while True:
        for mode in ("off", "on"):
            await asyncio.sleep(10.0)
            (await client.put("/v1/offload/fleet", json={"mode": mode})).raise_for_status()


async def _metrics(client: httpx2.AsyncClient) -> dict[str, float]:
    lines = [line for line in (await client.get("/metrics")).text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _report(seen: Seen, told: dict[str, float], lasted: float, cpu: float) -> int:
    def total(prefix: str) -> float:
        return sum(value for name, value in told.items() if name.startswith(prefix))

    joined, lost = total("kvguard_ttft_seconds_count"), total("kvguard_ingest_lost_spans_total")
    orphans = total("kvguard_ingest_orphans_total")
    rejected = told.get('kvguard_ingest_spans_total{outcome="rejected"}', 0.0)
    whole = joined == seen.requests and not (lost or orphans or rejected or seen.refused)
    at, held = (np.array(column, dtype=float) for column in zip(*seen.memory, strict=True))
    settled = at >= at[0] + min(120.0, lasted / 3)  # windows are full
    slope = float(np.polyfit(at[settled], held[settled], 1)[0]) * 60 if settled.sum() > 2 else float("nan")
    p50, p99, top = np.quantile(seen.latencies, [0.5, 0.99, 1.0]) * 1e3
    met = whole and p99 <= GOAL_LATENCY * 1e3
    rate = f"{seen.requests / lasted:,.0f} a second"
    print(f"soak: {lasted / 60:.1f} min, {seen.requests:,} requests ({rate}), {seen.spans:,} spans")
    print(f"  sender late by {seen.behind:.1f} s at the worst, load average {os.getloadavg()[0]:.1f}")
    print(f"  joined {joined:,.0f}, lost {lost:,.0f}, orphans {orphans:,.0f}, rejected {rejected:,.0f},", end=" ")
    print(f"refused bodies {seen.refused:,}: {'no drops' if whole else 'DROPS'}")
    first, last = held[0] / 2**20, held[-1] / 2**20
    print(f"  memory {first:.0f} MiB at first, {last:.0f} at the end, slope {slope / 2**20:+.2f} MiB/min")
    print(
        f"  directive: p50 {p50:.1f} ms, p99 {p99:.1f} (goal <= 100), longest {top:.0f}, n {len(seen.latencies):,};",
        end=" ",
    )
    print(f"service {cpu / lasted:.0%} of a CPU")
    median, worst = np.median(seen.lags) * 1e3, max(seen.lags) * 1e3
    print(f"  loop lag, the worst of every 5 s: median {median:.0f} ms, longest {worst:.0f}", end="; ")
    print(f"history rows {total('kvguard_history_rows_total'):,.0f}: {'met' if met else 'MISSED'}")
    return int(not met)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    sys.exit(main(parser.parse_args().minutes))
