"""What travels between the scheduler and the workers of one engine, with vLLM's own messages. Standard library only.

What a worker must know rides on the connector's own metadata as one extra attribute, an `Envelope` of plain values.
A synchronous load happens inside the worker's step, where the scheduler cannot see it, so its timing goes back as
the step's worker metadata, wrapped around the connector's own (`SyncLoads`). Whether there is a wrapper is decided by
the envelope alone: it is the same on every rank, which is what vLLM's aggregation needs.
"""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

ENVELOPE: Final = "_kvguard_envelope"
"""Name of the attribute on the connector's metadata."""


class Context(NamedTuple):
    """The trace of one request, as far as a worker needs it. Ids are numbers."""

    request_id: str
    trace_id: int
    sampled: bool
    request_span: int
    lookup_span: int


class Load(NamedTuple):
    """One fetch attempt that starts in this step."""

    request_id: str
    fetch_span: int
    attempt: int
    tokens: int
    asynchronous: bool


class Envelope(NamedTuple):
    """What the scheduler tells the workers with a step. `batch` is not 0 where the step loads synchronously.

    It travels as plain tuples: unpickling a class of ours would stop a worker on a machine without kvguard.
    """

    contexts: tuple[Context, ...]
    loads: tuple[Load, ...]
    batch: int

    def plain(self) -> tuple[Any, ...]:
        """The envelope as tuples of plain values."""
        return tuple(map(tuple, self.contexts)), tuple(map(tuple, self.loads)), self.batch

    @classmethod
    def read(cls, plain: Any) -> "Envelope | None":
        """The envelope of `plain`; None where there is none, or one of another version. Never raises."""
        if plain is None:
            return None
        try:
            contexts, loads, batch = plain
            return cls(tuple(Context(*one) for one in contexts), tuple(Load(*one) for one in loads), int(batch))
        except (TypeError, ValueError):
            return None


@dataclass(slots=True)
class SyncLoads:
    """Timing of a step's synchronous loads, around the connector's own worker metadata; the slowest rank counts."""

    inner: Any
    batch: int
    start: int
    end: int
    boot: str  # names the clock that start and end are on

    def aggregate(self, other: Any) -> "SyncLoads":
        """Merges another rank's report of the same step."""
        if not isinstance(other, SyncLoads):
            inner = other if self.inner is None else self.inner.aggregate(other)
            return SyncLoads(inner, self.batch, self.start, self.end, self.boot)
        if self.inner is None or other.inner is None:
            inner = self.inner if other.inner is None else other.inner
        else:
            inner = self.inner.aggregate(other.inner)
        same = self.boot == other.boot
        later = other.end > self.end if same else other.end - other.start > self.end - self.start
        slow = other if later else self
        return SyncLoads(inner, self.batch, slow.start, slow.end, slow.boot)


def boot_id() -> str:
    """Names the monotonic clock of this machine and time namespace: equal names mean comparable times."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return socket.gethostname()
