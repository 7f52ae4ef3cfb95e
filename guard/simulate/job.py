"""One request on its way through a simulated engine: what it asks for, what was decided, and when what happened."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from guard.gate import Decision


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as it arrives. `hits` are the tokens held locally and remotely where a recording tells; else caches."""

    tokens: int
    output: int
    blocks: tuple[Hashable, ...] = ()
    engine: int | None = None
    hits: tuple[int, int] | None = None
    session: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """State of one request; times in seconds of the simulation's clock, 0 where it did not happen."""

    number: int
    prompt: Prompt
    engine: int
    arrival: float
    draw: float
    seen: float = 0.0
    running: int = 0
    waiting: int = 0
    local: int = 0
    found: int = 0  # tokens in the store, local ones included
    matched: int = 0
    loaded: int = 0
    position: int = 0  # tokens whose KV is there
    computed: int = 0
    skip: Decision | None = None
    load: Decision | None = None
    directive_id: str = ""
    propensity: float | None = None
    trickled: int = 0  # ns of the trickle before this one, where this is one
    asked: bool = False
    rtt: float = 0.0  # idle, when it was looked up
    lookup_start: float = 0.0
    lookup_end: float = 0.0
    lookup_trips: float = 0.0
    alloc: float = 0.0
    fetch_start: float = 0.0
    fetch_end: float = 0.0
    fetch_trips: float = 0.0
    fetch_bytes: int = 0
    moved_bytes: int = 0  # over the link, for its lookup and its fetch
    inflight: int = 0
    failed: bool = False
    batch: int = 0  # loads that held up the same step
    usable: float = 0.0
    scheduled: float = 0.0
    first: float = 0.0
    finish: float = 0.0
    finish_step: int = 0
    aborted: float = 0.0
    gave_up: bool = False  # no longer waits for its read: a fixed deadline ran out
    kv: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token; infinity when there was none."""
        return self.first - self.arrival if self.first else float("inf")

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for one token or an unfinished request."""
        return (self.finish - self.first) / (self.prompt.output - 1) if self.finish and self.prompt.output > 1 else None


class Gates(Protocol):
    """Who decides whether a request may read remote KV: a policy, or the real gate under directives."""

    def stores(self, engine: int) -> bool:
        """Whether new KV goes to the store."""
        ...

    def lookup(self, now: float, job: Job) -> Decision:
        """Before the lookup."""
        ...

    def load(self, now: float, job: Job) -> Decision:
        """When the match is known."""
        ...

    def opened(self, now: float, job: Job, *, fetch: bool) -> None:
        """A fetch has begun, or a lookup."""
        ...

    def closed(self, now: float, job: Job, *, fetch: bool, ok: bool) -> None:
        """That is over."""
        ...

    def deadline(self, job: Job) -> float | None:
        """Seconds after which a request no longer waits for its read; None: it waits."""
        ...


class Sink(Protocol):
    """Who is told of requests."""

    def first(self, now: float, job: Job) -> None:
        """The first token is there, or the request was aborted before it."""
        ...

    def stored(self, now: float, job: Job, tokens: int, seconds: float) -> None:
        """So many tokens go to the store, in so much time; it is nobody's wait."""
        ...

    def finished(self, now: float, job: Job) -> None:
        """The last token is there, or the request was aborted."""
        ...
