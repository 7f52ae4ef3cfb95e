"""Spans that came before what they belong to, kept until it is here, within bounds."""

from dataclasses import dataclass, field

from guard.correlate.counts import Counts, add
from guard.wire import Span


@dataclass(slots=True)
class _Parked:
    """The spans of one key, by span id."""

    first_ns: int
    spans: dict[str, Span] = field(default_factory=dict)


class Parking:
    """Spans by the key of what they wait for: a fetch, lookup, request or session. Its length is theirs, not the keys'.

    Beyond `most` spans the key that came first makes room; of one key `most_per_key` are kept. Both are counted.
    """

    def __init__(self, counts: Counts, most: int, most_per_key: int) -> None:
        self._counts = counts
        self._most, self._most_per_key = most, most_per_key
        self._by_key: dict[str, _Parked] = {}  # oldest first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, key: str, span: Span, now_ns: int) -> None:
        """Keeps a span that arrived at `now_ns`."""
        while self._size >= self._most:
            self._drop(self._counts.evicted)
        parked = self._by_key.get(key)
        if parked is None:
            parked = self._by_key[key] = _Parked(now_ns)
        if span.span_id in parked.spans:
            self._counts.duplicates += 1
        elif len(parked.spans) >= self._most_per_key:
            add(self._counts.overflow, (span,))
        else:
            parked.spans[span.span_id] = span
            self._size += 1

    def add_all(self, key: str, spans: dict[str, Span], now_ns: int) -> None:
        """As `add` for spans of one key, by id; `spans` is kept."""
        parked = self._by_key.get(key)
        if (
            self._size + len(spans) > self._most
            or len(spans) + (len(parked.spans) if parked else 0) > self._most_per_key
            or not (parked is None or parked.spans.keys().isdisjoint(spans))
        ):
            for span in spans.values():
                self.add(key, span, now_ns)
            return
        if parked is None:
            self._by_key[key] = _Parked(now_ns, spans)
        else:
            parked.spans.update(spans)
        self._size += len(spans)

    def take(self, key: str) -> dict[str, Span]:
        """Hands over what waited for `key`, by span id."""
        parked = self._by_key.pop(key, None)
        if parked is None:
            return {}
        self._size -= len(parked.spans)
        return parked.spans

    def expire(self, until_ns: int) -> None:
        """Counts as orphans the spans of keys that came at `until_ns` or before."""
        while self._by_key and next(iter(self._by_key.values())).first_ns <= until_ns:
            self._drop(self._counts.orphans)

    def _drop(self, lost: dict[str, int]) -> None:
        parked = self._by_key.pop(next(iter(self._by_key)))
        self._size -= len(parked.spans)
        add(lost, parked.spans.values())
