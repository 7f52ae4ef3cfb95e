"""The account of the join: every span that came in is in exactly one of these counts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from guard.semconv import LMCACHE_SPAN_PREFIX
from guard.wire import Span


def kind_of(name: str) -> str:
    """The bounded label of a span name: `kv.fetch`, `llm_request`, `mp` and so on."""
    return "mp" if name.startswith(LMCACHE_SPAN_PREFIX) else name.removeprefix("kvguard.")


@dataclass(slots=True)
class Counts:
    """`received` = joined + duplicates + ignored + orphans + evicted + overflow + what still waits."""

    received: int = 0
    joined: int = 0  # spans that are part of a record
    duplicates: int = 0
    ignored: int = 0  # names that the join does not know
    orphans: dict[str, int] = field(default_factory=dict)  # by kind: no request by the watermark, or later than it
    evicted: dict[str, int] = field(default_factory=dict)  # by kind: dropped to bound memory
    overflow: dict[str, int] = field(default_factory=dict)  # by kind: more spans than one request may have
    clamped: dict[str, int] = field(default_factory=dict)  # by attribute: values put right (not spans)
    records: int = 0  # requests given out
    incomplete: int = 0  # of these: given out at the watermark, without a lookup or fetch that they speak of
    amended: int = 0  # updates of requests already given out

    @property
    def settled(self) -> int:
        """Spans that do not wait any more."""
        lost = sum(self.orphans.values()) + sum(self.evicted.values()) + sum(self.overflow.values())
        return self.joined + self.duplicates + self.ignored + lost


def add(counter: dict[str, int], spans: Iterable[Span]) -> None:
    """Counts spans by kind."""
    for span in spans:
        kind = kind_of(span.name)
        counter[kind] = counter.get(kind, 0) + 1
