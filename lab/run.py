"""`python -m lab run`: a mixed load at several round-trip times, offload switched off and on, and the table."""

import argparse
import os
import signal
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.client import Completion, prompt
from lab.config import StackConfig
from lab.env import LabEnv
from lab.errors import LabError
from lab.stack import Stack

KINDS = ("miss", "partial", "hit")
OFF = "hit, off"
APPLY_SECONDS = 10.0


@dataclass(frozen=True)
class Size:
    """How much load: requests per kind and round-trip time, tokens per prompt."""

    repeats: int
    tokens: int


FULL, QUICK = Size(repeats=4, tokens=2000), Size(repeats=2, tokens=1200)


@dataclass
class Row:
    """All requests of one kind at one round-trip time: the client's view, the store's, and the service's."""

    seen: list[Completion] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # EXISTS and GET per request
    records: list[dict[str, Any]] = field(default_factory=list)


class Load:
    """Sends one request at a time, so that a row of the table is about one thing; fills `rows`."""

    def __init__(self, stack: Stack, size: Size, progress: Progress) -> None:
        self.stack, self.size, self._progress = stack, size, progress
        self.rows: dict[tuple[float, str], Row] = defaultdict(Row)
        self._fresh = 10_000
        self._known = [prompt(size.tokens, seed) for seed in range(2 * size.repeats)]

    def warm_up(self, task: Any) -> None:
        """Lets vLLM compute and store the prompts that will be hits, then leaves them in the store only."""
        for text in self._known:
            self.stack.client.complete(text)
            self._progress.advance(task)
        self.stack.drain()

    def round(self, rtt_ms: float, task: Any) -> None:
        """One round: misses, partial hits (the first half is known) and hits, in turn."""
        self._set_rtt(rtt_ms)
        half = self.size.tokens // 2
        for index in range(self.size.repeats):
            self._one(rtt_ms, "miss", self._new(self.size.tokens), task)
            self._one(rtt_ms, "partial", self._known[self.size.repeats + index][:half] + self._new(half), task)
            self._one(rtt_ms, "hit", self._known[index], task)
        self.stack.drain()

    def off_and_on(self, rtt_ms: float, task: Any) -> None:
        """The hits again with offload switched off through the service, then switched back."""
        self._set_rtt(rtt_ms)
        _applied(self.stack.service.switch("off", wait=APPLY_SECONDS, reason="lab run"))
        for text in self._known[: self.size.repeats]:
            self._one(rtt_ms, OFF, text, task)
        _applied(self.stack.service.switch("on", wait=APPLY_SECONDS, reason="lab run"))
        self.stack.drain()

    def collect(self, task: Any) -> None:
        """Asks the service for the record of every request."""
        for row in self.rows.values():
            for done in row.seen:
                row.records.append(self.stack.service.request(done.request_id))
                self._progress.advance(task)

    def _set_rtt(self, rtt_ms: float) -> None:
        if self.stack.injector is not None:
            self.stack.injector.rtt(rtt_ms * 1e3)

    def _new(self, tokens: int) -> str:
        self._fresh += 1
        return prompt(tokens, self._fresh)

    def _one(self, rtt_ms: float, kind: str, text: str, task: Any) -> None:
        row, redis = self.rows[rtt_ms, kind], self.stack.redis
        before = redis.counts() if redis else Counter()
        row.seen.append(self.stack.client.complete(text))
        if redis:
            delta = redis.counts() - before
            row.reads.append(delta["EXISTS"] + delta["GET"])
            self.stack.settle_stores()  # a store still under way would slow the next read
        self._progress.advance(task)


def run(options: argparse.Namespace, env: LabEnv, current: Path) -> None:
    """Starts the stack, drives the load, prints the table, stops the stack."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    size = QUICK if options.quick else FULL
    rtts = [float(part) for part in options.rtts.split(",")]
    config = StackConfig(connector=options.connector, injector=options.injector, otlp="service")
    if not config.uses_store:
        rtts = [0.0]  # there is no link to slow
    with _progress(console) as progress:
        task = progress.add_task("starting", total=None)
        stack = Stack(config, env, keep_logs=options.keep, say=lambda text: progress.update(task, description=text))
        with stack:
            _publish(stack, current)
            progress.remove_task(task)
            load = drive(stack, size, rtts, progress)
            progress.stop()
            console.print(table(load, config))
            if options.keep:
                _keep(stack, console)


def drive(stack: Stack, size: Size, rtts: list[float], progress: Progress) -> Load:
    """The whole load; in the middle of the last, slowest round offload is switched off and on again."""
    load = Load(stack, size, progress)
    task = progress.add_task("filling the store", total=2 * size.repeats)
    load.warm_up(task)
    for index, rtt_ms in enumerate(rtts):
        task = progress.add_task(f"+{rtt_ms:g} ms round trip", total=len(KINDS) * size.repeats)
        load.round(rtt_ms, task)
        if index == len(rtts) - 1:
            task = progress.add_task("switched off, then on", total=size.repeats)
            load.off_and_on(rtt_ms, task)
            task = progress.add_task(f"+{rtt_ms:g} ms, on again", total=len(KINDS) * size.repeats)
            load.round(rtt_ms, task)
    task = progress.add_task("reading the service's records", total=sum(len(row.seen) for row in load.rows.values()))
    load.collect(task)
    return load


def table(load: Load, config: StackConfig) -> Table:
    """Medians per round-trip time and kind, in milliseconds: the client's TTFT beside what the service joined."""
    shown = Table(title=f"{config.connector}: medians in ms, {load.size.tokens} prompt tokens (source: measured)")
    for name in (
        "RTT added",
        "kind",
        "n",
        "TTFT client",
        "TTFT hook",
        "lookup",
        "fetch",
        "prefill",
        "store reads",
        "decision",
    ):
        shown.add_column(name, justify="left" if name in ("kind", "decision") else "right")
    last = None
    for (rtt_ms, kind), row in load.rows.items():
        if last not in (None, rtt_ms):
            shown.add_section()
        last = rtt_ms
        parts = {name: [_part(record, name) for record in row.records] for name in ("lookup", "fetch", "prefill")}
        shown.add_row(
            f"{rtt_ms:g}",
            kind,
            str(len(row.seen)),
            _median([done.ttft for done in row.seen]),
            _median([record["ttft_seconds"] for record in row.records]),
            *(_median(parts[name]) for name in ("lookup", "fetch", "prefill")),
            f"{statistics.median(row.reads):g}" if row.reads else "-",
            ", ".join(f"{n} {what}" for what, n in Counter(record["decision"] for record in row.records).items()),
        )
    return shown


def _part(record: dict[str, Any], name: str) -> float:
    return next(part["seconds"] for part in record["timeline"] if part["part"] == name)


def _median(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{statistics.median(known) * 1e3:.1f}" if known else "-"


def _applied(answer: dict[str, Any]) -> None:
    if answer["pending"] or not answer["acknowledged"]:
        raise LabError(f"the hook did not apply the switch within {APPLY_SECONDS:g} s: {answer}")


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _publish(stack: Stack, current: Path) -> None:
    """Lets `lab injector` and `lab exec` find this run."""
    (stack.run_dir / "pid").write_text(str(os.getpid()))
    current.unlink(missing_ok=True)
    current.symlink_to(stack.run_dir)


def _keep(stack: Stack, console: Console) -> None:
    service = stack.service.url
    console.print(
        f"\nvLLM [bold]http://127.0.0.1:{stack.client.port}[/]  kvguard [bold]{service}[/]  logs {stack.run_dir}"
    )
    console.print(
        "These addresses lie in the lab's namespace:  python -m lab exec -- curl -s " + service + "/v1/offload"
    )
    console.print("The link:  python -m lab injector rtt 5000    Ctrl-C stops everything.")
    signal.pause()
