"""2,000 hooks on one service process: how soon a fleet switch is with all, alone and beside 10,000 idle connections.

The time runs from the answer to the PUT until the hook has read its directive. Hooks and the switch are one client
process, idle connections another, the service a third; all on this machine.
"""

import asyncio
import contextlib
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator

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
        with _idle(int(url.rpartition(":")[2]), idle):
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


@contextlib.contextmanager
def _idle(port: int, count: int) -> Iterator[None]:
    """Another process whose connections say nothing; those that the service closes are opened again, as by an enemy."""
    process = multiprocessing.get_context("spawn").Process(target=_say_nothing, args=(port, count), daemon=True)
    process.start()
    time.sleep(5.0)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _say_nothing(port: int, count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def hold(wait: float) -> None:
        while True:
            await asyncio.sleep(wait)
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    await reader.read()
                finally:
                    writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(hold(3.0 * number / count) for number in range(count)))

    asyncio.run(all_of_them())
