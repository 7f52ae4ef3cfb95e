"""`python -m lab bench`: what the hook costs a real vLLM, in paired blocks on one engine, with and without it.

Two engines differ by several per cent whatever runs in them (memory layout, cores), so it is one and the same whose
connector has the hook taken out and put back (`lab/shim/kvguard_lab_switch.py`). The hook's two threads stay, idle;
what they cost is in `make bench`. A block is a short mixed load (throughput, TTFT); in some a steady decoding follows
(step time: the gap between two tokens of a running stream, as the client sees it). Blocks are short and in turn, ABBA,
as the machine's own speed wanders. The service that listens to the hook runs on the same machine, so its share of the
cores is part of what is measured. Nothing else may run.
"""

import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.client import Client, Completion, prompt
from lab.config import StackConfig
from lab.env import LabEnv
from lab.errors import LabError
from lab.pair import interval, ratio
from lab.processes import wait_until
from lab.stack import Stack

GOAL = 0.98
"""Low end of the interval of throughput with the hook over throughput without."""

ENOUGH = 30
"""Paired blocks for a result."""

CONNECTORS = 2
"""Guarded connectors of an engine: the scheduler's and the worker's."""

CLIENTS = 4
HITS = tuple(prompt(1100, 6000 + seed) for seed in range(6))
EACH, MISS_TOKENS, OUTPUT = 2, 500, 16
STREAM_EVERY, STREAMS, STREAM_TOKENS, STREAM_PROMPT = 8, 4, 64, 120


@dataclass
class Block:
    """One block, with or without the hook. Seconds; CPU seconds of all of vLLM's processes."""

    wall: float
    requests: int
    cpu: float
    ttft: dict[str, float]
    gaps: list[float] = field(default_factory=list)


class Switch:
    """The hook of a running stack, out and in.

    Args:
        stack: runs with `LAB_HOOK_SWITCH` set to `path`.
        path: stem of the files in which processes say what they did.
    """

    def __init__(self, stack: Stack, path: Path) -> None:
        self._files = {int(said.suffix[1:]): said for said in path.parent.glob(f"{path.name}.*")}
        self._files = {pid: said for pid, said in self._files.items() if pid in stack.vllm.descendants()}

    def __call__(self, *, hook: bool) -> None:
        """Takes the hook out or puts it back, and waits until it is so in every process.

        Raises:
            LabError: a process did not answer, or none had a hook.
        """
        word = "in" if hook else "out"
        for pid in self._files:
            os.kill(pid, signal.SIGUSR2 if hook else signal.SIGUSR1)
        wait_until(lambda: all(text.startswith(word) for text in self._said()), 10.0, f"the hook to be {word}")
        if sum(int(text.split()[1]) for text in self._said()) < CONNECTORS:
            raise LabError(f"the switch found fewer than {CONNECTORS} hooked connectors: {', '.join(self._said())}")

    def _said(self) -> list[str]:
        return [said.read_text() for said in self._files.values()]


class Timed(Client):
    """A client that keeps when each token came."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.times: dict[str, list[float]] = {}

    def _take(self, done: Completion, event: dict[str, Any], now: float) -> None:  # type: ignore[override]
        super()._take(done, event, now)
        if event["choices"]:
            self.times.setdefault(done.request_id, []).append(now)


def work(number: int) -> list[tuple[str, str]]:
    """Kind and prompt of every request of a block: remote hits, misses, local hits (asked for a second time)."""
    hits = [HITS[(EACH * number + index) % len(HITS)] for index in range(EACH)]
    misses = [prompt(MISS_TOKENS, 700_000 + EACH * number + index) for index in range(EACH)]
    kinds = ("hit", "miss")
    mixed = [pick for two in zip(hits, misses, strict=True) for pick in zip(kinds, two, strict=True)]
    return mixed + [("local", text) for text in hits]


def run_block(number: int, stack: Stack, *, streams: bool) -> Block:
    """A mixed load, then steady decoding where asked for. Ends with all stores written."""
    client = Timed(stack.client.port)
    client.reset_prefix_cache()
    requests = work(number)
    cpu, began = cpu_seconds(stack), perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda one: client.complete(one[1], max_tokens=OUTPUT), requests))
    wall = perf_counter() - began
    cpu = cpu_seconds(stack) - cpu
    kinds: dict[str, list[float]] = {}
    for (kind, _), done in zip(requests, answers, strict=True):
        kinds.setdefault(kind, []).append(done.ttft or 0.0)
    gaps = list(decode(number, client)) if streams else []
    stack.settle_stores()
    return Block(wall, len(requests), cpu, {kind: median(found) for kind, found in kinds.items()}, gaps)


def decode(number: int, client: Timed) -> Iterator[float]:
    """Gaps between tokens of streams that run at the same time, seconds."""
    with ThreadPoolExecutor(STREAMS) as pool:
        texts = [prompt(STREAM_PROMPT, 710_000 + 10 * number + index) for index in range(STREAMS)]
        for done in pool.map(lambda text: client.complete(text, max_tokens=STREAM_TOKENS), texts):
            yield from steady(client.times[done.request_id])


def steady(times: list[float]) -> Iterator[float]:
    """Gaps between tokens, the first and last few left out, where streams start and end."""
    for earlier, later in pairwise(times[8:-4]):
        yield later - earlier


def cpu_seconds(stack: Stack) -> float:
    """CPU time of vLLM's processes so far."""
    return sum(process_cpu(pid) for pid in stack.vllm.descendants())


def process_cpu(pid: int) -> float:
    """User and system time of a process, in seconds (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    """The smallest value that has so large a share of them at or below it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bench(blocks: int, env: LabEnv) -> bool:
    """Runs the paired blocks and prints what came of them; whether the goal is met."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory(prefix="kvlab-switch-") as place:
        path = Path(place) / "hook"
        config = StackConfig(injector="none", hook_env={"LAB_HOOK_SWITCH": str(path)})
        with Stack(config, env, say=console.log) as stack, Progress(console=console) as progress:
            prepare(stack)
            task = progress.add_task("paired blocks", total=blocks)
            switch = Switch(stack, path)
            run_block(0, stack, streams=True)  # a warm-up that is not counted
            service = process_cpu(stack.service_process.pid)
            found = []
            for number in range(blocks):
                found.append(in_turn(number, stack, switch))
                progress.advance(task)
            service = process_cpu(stack.service_process.pid) - service
            switch(hook=True)
            known = sum(row["n"] for row in stack.service.get("/v1/correlation")["engines"])
    console.print(table([one for one, _ in found], [two for _, two in found]))
    _, low, high = throughput(found)
    met = low >= GOAL
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end; the service "
        f"used {service / blocks:.3f} CPU seconds per pair; {known} requests known to it.\n"
        f"Throughput ratio, 95 % interval [{low:.3f}, {high:.3f}]; goal: low end >= {GOAL}: "
        f"{'met' if met else 'NOT met'}"
    )
    if blocks < ENOUGH:
        console.print(f"Only {blocks} of {ENOUGH} blocks: a trial and no result.")
    return met


def in_turn(number: int, stack: Stack, switch: Switch) -> tuple[Block, Block]:
    """The block with the hook, and without; which of them is first changes as ABBA."""
    blocks = {}
    for side, hook in enumerate((True, False) if number % 4 in (0, 3) else (False, True)):
        switch(hook=hook)
        blocks[hook] = run_block(1 + 2 * number + side, stack, streams=number % STREAM_EVERY == 0)
    return blocks[True], blocks[False]


def prepare(stack: Stack) -> None:
    """Puts the prompts of the hits into the store."""
    for text in HITS:
        stack.client.complete(text, max_tokens=1)
    stack.drain()


def throughput(found: list[tuple[Block, Block]]) -> tuple[float, float, float]:
    """Requests per second with the hook over without."""
    return ratio([one.requests / one.wall for one, _ in found], [two.requests / two.wall for _, two in found])


def table(hooked: list[Block], plain: list[Block]) -> Table:
    """Figures of both engines, and ratio or difference with its interval over blocks."""
    shown = Table(title=f"{len(hooked)} paired blocks, hook on / off (source: measured)")
    for name in ("figure", "hook on", "hook off", "on / off", "95 % interval"):
        shown.add_column(name, justify="left" if name == "figure" else "right")

    def row(name: str, on: list[float], off: list[float], scale: float = 1.0) -> None:
        middle, low, high = ratio(on, off)
        shown.add_row(
            name, f"{fmean(on) * scale:.2f}", f"{fmean(off) * scale:.2f}", f"{middle:.4f}", f"[{low:.4f}, {high:.4f}]"
        )

    row("requests / s", [one.requests / one.wall for one in hooked], [one.requests / one.wall for one in plain])
    row("vLLM CPU s / block", [one.cpu for one in hooked], [one.cpu for one in plain])
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        sides = [[percentile(one.gaps, share) for one in side if one.gaps] for side in (hooked, plain)]
        row(f"step {name}, ms", *sides, 1e3)
    pooled = [percentile([gap for one in side for gap in one.gaps], 0.99) * 1e3 for side in (hooked, plain)]
    steps = sum(len(one.gaps) for one in hooked)
    shown.add_row(f"step p99 of all {steps}, ms", *(f"{value:.2f}" for value in pooled), f"{pooled[0] / pooled[1]:.4f}")
    for kind in ("hit", "local", "miss"):
        on, off = [one.ttft[kind] for one in hooked], [two.ttft[kind] for two in plain]
        row(f"TTFT {kind}, ms", on, off, 1e3)
        middle, low, high = interval([a - b for a, b in zip(on, off, strict=True)])
        shown.add_row("  difference, ms", "", "", f"{middle * 1e3:+.2f}", f"[{low * 1e3:+.2f}, {high * 1e3:+.2f}]")
    return shown
