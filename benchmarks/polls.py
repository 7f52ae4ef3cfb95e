"""2,000 hooks on one service process: how soon a fleet switch is with all, alone and beside 10,000 idle connections.

The time runs from the answer to the PUT until the hook has read its directive. Hooks, idle connections and the switch
are one client process, the service is another; both on this machine.
"""

import asyncio
import contextlib
import os
import resource
import tempfile
import time

import httpx2
import numpy as np

from benchmarks.hooks import Hook
from benchmarks.server import cpu_seconds, free_port, running, service

HOOKS = int(os.environ.get("KVGUARD_BENCH_HOOKS", "2000"))
IDLE = int(os.environ.get("KVGUARD_BENCH_IDLE", "10000"))
SWITCHES = 10
GOAL = 1.0


def main() -> int:
    """Prints the latencies; 1 when the p99 of either run is above the goal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port = free_port()
    with tempfile.TemporaryDirectory() as state, running(service(port, state), port) as process:
        print(f"polls: {HOOKS:,} hooks on one process, fleet switch to the last hook, load {os.getloadavg()[0]:.1f}")
        try:
            return asyncio.run(_play(f"http://127.0.0.1:{port}", process.pid, min(IDLE, hard - HOOKS - 500)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _play(url: str, pid: int, idle: int) -> int:
    hooks = [Hook(url, number) for number in range(HOOKS)]
    tasks = [asyncio.create_task(hook.run()) for hook in hooks]
    try:
        await _until(hooks, "auto", 0.0)
        missed = await _rounds(url, hooks, pid, "alone")
        async with _idle(url, idle):
            missed |= await _rounds(url, hooks, pid, f"beside {idle:,} idle connections")
        return int(missed)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _rounds(url: str, hooks: list[Hook], pid: int, what: str) -> bool:
    late: list[float] = []
    before, began = cpu_seconds(pid), time.monotonic()
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for number in range(SWITCHES):
            mode = ("off", "on")[number % 2]
            answer = await client.put("/v1/offload/fleet", json={"mode": mode})
            answer.raise_for_status()
            told = time.monotonic()
            await _until(hooks, mode, told - 60.0)
            late += [max(0.0, hook.applied[mode] - told) for hook in hooks]
            for hook in hooks:
                hook.applied.clear()
            await asyncio.sleep(1.0)
    p50, p99, top = np.quantile(late, [0.5, 0.99, 1.0])
    cpu = (cpu_seconds(pid) - before) / (time.monotonic() - began)
    word = "met" if p99 <= GOAL else "MISSED"
    print(
        f"  {what}: p50 {p50:.3f} s, p99 {p99:.3f} s, longest {top:.3f} s, n {len(late):,}; service {cpu:.0%} of a CPU;"
        f" goal p99 <= {GOAL:.0f} s: {word}",
        flush=True,
    )
    return bool(p99 > GOAL)


async def _until(hooks: list[Hook], mode: str, since: float) -> None:
    deadline = time.monotonic() + 120.0
    while any(hook.applied.get(mode, -1.0) < since for hook in hooks):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{sum(mode not in hook.applied for hook in hooks)} hooks never had {mode}")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _idle(url: str, count: int):  # noqa: ANN202
    """Connections that say nothing; those that the service closes are opened again, as a hostile client would."""
    host, port = url.removeprefix("http://").split(":")

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(hold()) for _ in range(count)]
    await asyncio.sleep(2.0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
