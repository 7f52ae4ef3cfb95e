"""A fake engine, service and injector that share one invented world: TTFT follows a formula, no time passes."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from guard.errors import SweepError
from guard.sweep.engine import Answer

PROMPT = 1000


@dataclass
class World:
    """A remote hit takes base + trips * RTT, recomputing takes `recompute`, a local hit `local`; 3 % noise, seconds."""

    base: float = 0.1
    trips: float = 10.0
    recompute: float = 0.3
    local: float = 0.02
    rtt: float = 0.0
    mode: str = "auto"
    stored: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    override: bool = False
    loses_stores: bool = False
    fails_at: str = ""
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    # -- engine
    model = "fake"

    def complete(self, prompt: str, output_tokens: int) -> Answer:
        name = f"r{len(self.records)}"
        local = PROMPT if prompt in self.held else 0
        remote = PROMPT - 20 if not local and self.mode == "on" and prompt in self.stored else 0
        seconds = self.local if local else self.base + self.trips * self.rtt if remote else self.recompute
        seconds *= self.rng.lognormvariate(0.0, 0.03)
        self.held.add(prompt)
        if self.mode != "off" and not self.loses_stores:
            self.stored.add(prompt)
        parts = dict.fromkeys(("lookup", "slot", "fetch", "prefill"), 0.0)
        self.records[name] = {
            "ttft_seconds": seconds, "decision": "remote" if remote else "skip",
            "tokens": {"prompt": PROMPT, "local": local, "remote_loaded": remote},
            "timeline": [{"part": part, "seconds": value} for part, value in parts.items()],
            "lookup": {"round_trips": 4 if remote else None}, "fetches": [{"round_trips": 6}] if remote else [],
        }  # fmt: skip
        return Answer(name, seconds, PROMPT)

    def forget(self) -> None:
        self.held.clear()

    # -- service
    def refuse_override(self) -> None:
        if self.override:
            raise SweepError("a switch is in force for fleet: off; clear it first")

    def switch(self, mode: str) -> None:
        self.mode = mode

    def record(self, request_id: str) -> dict[str, Any]:
        return self.records[request_id]

    # -- injector
    def set(self, rtt_seconds: float) -> None:
        if self.fails_at and f"{rtt_seconds:g}" == self.fails_at:
            raise SweepError("the wire broke")
        self.rtt = rtt_seconds

    def restore(self) -> None:
        self.log.append("restored")
        self.rtt, self.mode = 0.0, "auto"


@pytest.fixture
def world() -> World:
    return World()
