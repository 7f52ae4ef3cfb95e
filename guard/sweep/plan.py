"""What a sweep measures, in which order: every tier of round-trip time x every concurrency x every road."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal

from guard.errors import ConfigError

Road = Literal["remote", "recompute", "local"]
ROADS: Final[tuple[Road, ...]] = ("remote", "recompute", "local")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `requests` requests on one road. `rtt` is what is added, seconds; `repeat` counts blocks."""

    rtt: float
    concurrency: int
    road: Road
    repeat: int

    @property
    def key(self) -> str:
        """Names the cell in the file of results."""
        return f"{self.rtt * 1e6:.0f}us/c{self.concurrency}/{self.road}/{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Times in seconds. `requests` per cell are sent by `concurrency` clients, each waiting for its answer.

    Raises:
        ConfigError: a value is out of range; names it.
    """

    rtts: tuple[float, ...]
    concurrencies: tuple[int, ...]
    requests: int = 8
    prompt_tokens: int = 2000
    output_tokens: int = 4
    repeats: int = 2
    local: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what cannot be measured."""
        _check("rtts", bool(self.rtts) and all(0.0 <= rtt <= 10.0 for rtt in self.rtts), "0 to 10 s each")
        _check("rtts", len(set(self.rtts)) == len(self.rtts), "each tier once")
        _check("concurrency", bool(self.concurrencies) and all(1 <= c <= 1024 for c in self.concurrencies), "1 to 1024")
        _check("requests", 2 <= self.requests <= 10_000, "2 to 10000")
        _check("prompt-tokens", 16 <= self.prompt_tokens <= 1_000_000, "16 to 1000000")
        _check("output-tokens", 1 <= self.output_tokens <= 10_000, "1 to 10000")
        _check("repeats", 1 <= self.repeats <= 100, "1 to 100")

    @property
    def prompts(self) -> int:
        """How many distinct prompts the cells need."""
        return max(self.requests, *self.concurrencies)

    def size(self, cell: Cell) -> int:
        """Requests of a cell: at least one per client."""
        return max(self.requests, cell.concurrency)

    def cells(self) -> Iterator[Cell]:
        """Blocks of all tiers in a random order, so that a drift of the machine's load is not taken for RTT.

        Within a tier and concurrency, remote and recompute stand next to each other, now one first, now the other.
        """
        rng = random.Random(self.seed)  # noqa: S311  an order, not a secret
        for repeat in range(self.repeats):
            for rtt in rng.sample(self.rtts, len(self.rtts)):
                for concurrency in self.concurrencies:
                    roads: list[Road] = ["remote", "recompute"]
                    rng.shuffle(roads)
                    for road in (*roads, *(["local"] if self.local else [])):
                        yield Cell(rtt, concurrency, road, repeat)  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """Equal for plans whose results belong together."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def parse_rtt(text: str) -> float:
    """Seconds of `200us`, `1.5ms`, `2s` or a bare number of milliseconds.

    Raises:
        ConfigError: it is none of these.
    """
    number, scale = text.strip(), 1e-3
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if number.endswith(unit):
            number, scale = number.removesuffix(unit), size
            break
    try:
        value = float(number) * scale
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 10.0:
        raise ConfigError("rtts", f"{text!r} is not a round-trip time such as 200us, 1.5ms or 0")
    return value


def _check(key: str, fine: bool, allowed: str) -> None:
    if not fine:
        raise ConfigError(key, f"out of range: {allowed}")
