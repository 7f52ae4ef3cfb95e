"""Spans that name a request id and no parent of ours, kept until it is sure whose they are, within bounds.

Those are vLLM's `llm_request` and `kvguard.decode`, which end with the request. Each request keeps the span that
`match.py` pairs it with; the pairing may change until the oldest is made final.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from guard import semconv as s
from guard.correlate.counts import Counts, add
from guard.correlate.ids import join_key
from guard.correlate.match import pair
from guard.correlate.pending import Pending
from guard.wire import Span

_MAX_GROUP = 64  # a client that sends one request id for ever must not cost more and more


@dataclass(slots=True)
class _Group:
    """Requests and spans that share what `join_key` makes of their ids."""

    requests: list[Pending] = field(default_factory=list)
    spans: dict[str, Span] = field(default_factory=dict)


class LooseEnds:
    """The spans, and every request that one of them may be of. Its length is that of the spans.

    Beyond `most` spans the oldest is made final, found or lost.
    """

    def __init__(self, counts: Counts, most: int) -> None:
        self._counts = counts
        self._most = most
        self._loose: dict[str, tuple[int, Span, str]] = {}  # by span id, oldest first: arrival, span, join key
        self._by_parent: dict[str, dict[str, Span]] = {}
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._loose)

    def enter(self, one: Pending, name: str) -> Sequence[Pending]:
        """Takes a request of this id; returns those whose pairing may have changed by it."""
        one.join_key = join_key(name)
        group = self._groups.setdefault(one.join_key, _Group())
        group.requests = [*group.requests[1 - _MAX_GROUP :], one]
        if not group.spans:
            return ()
        pair(group.requests, list(group.spans.values()))
        return group.requests

    def leave(self, one: Pending) -> None:
        """Forgets a request; what is paired with it stays its own."""
        group = self._groups.get(one.join_key)
        if group is not None:
            group.requests = [other for other in group.requests if other is not one]
            if not group.requests and not group.spans:
                del self._groups[one.join_key]

    def add(self, span: Span, now_ns: int) -> Sequence[Pending]:
        """Keeps a span that arrived at `now_ns`; returns the requests whose pairing may have changed by it."""
        key = join_key(str(span.attributes.get(s.REQUEST_ID, "")))
        group = self._groups.get(key) if key else None
        if span.span_id in self._loose or (group and any(span.span_id in one.late for one in group.requests)):
            self._counts.duplicates += 1
            return ()
        if group and len(group.spans) >= _MAX_GROUP:
            add(self._counts.overflow, (span,))
            return ()
        while len(self._loose) >= self._most:
            self._settle(self._counts.evicted)
        self._loose[span.span_id] = (now_ns, span, key)
        if span.parent_id:
            self._by_parent.setdefault(span.parent_id, {})[span.span_id] = span
        if not key:
            return ()
        if group is None:
            group = self._groups[key] = _Group()
        group.spans[span.span_id] = span
        pair(group.requests, list(group.spans.values()))
        return group.requests

    def take(self, parent: str) -> Sequence[Span]:
        """Hands over the spans of a parent that turned out to be ours."""
        found = self._by_parent.get(parent)
        if found is None:
            return ()
        spans = tuple(found.values())
        for span in spans:
            self._remove(span.span_id)
        return spans

    def expire(self, until_ns: int) -> None:
        """Makes final the spans that came at `until_ns` or before; those of no request are orphans."""
        while self._loose and next(iter(self._loose.values()))[0] <= until_ns:
            self._settle(self._counts.orphans)

    def _settle(self, lost: dict[str, int]) -> None:
        """Makes the oldest pairing final, or counts the span as lost."""
        span, group = self._remove(next(iter(self._loose)))
        for one in group.requests if group is not None else ():
            if one.vllm_loose is span or one.decode_loose is span:
                one.late.add(span.span_id)
                if one.vllm_loose is span:
                    one.vllm, one.vllm_loose = span, None
                else:
                    one.decode, one.decode_loose = span, None
                self._counts.joined += 1
                return
        add(lost, (span,))

    def _remove(self, span_id: str) -> tuple[Span, _Group | None]:
        _, span, key = self._loose.pop(span_id)
        siblings = self._by_parent.get(span.parent_id)
        if siblings is not None:
            siblings.pop(span_id, None)
            if not siblings:
                del self._by_parent[span.parent_id]
        group = self._groups.get(key) if key else None
        if group is not None:
            group.spans.pop(span_id, None)
            if not group.spans and not group.requests:
                del self._groups[key]
        return span, group
