"""Gathers what the controller needs to know, per engine and backend, from records and from what the hooks tell.

All of it runs in the event loop; memory is bounded. Times are monotonic seconds.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from guard import gate, semconv
from guard.connectors import capability_of_label
from guard.control.shapes import Read
from guard.costs import Costs
from guard.wire import FetchRecord, RequestRecord

Key = tuple[str, str]
"""Engine id and backend."""

FRESH_SECONDS: Final = 3.0
"""What a hook told of its reads in flight counts for so long; it tells every second while there are some."""

MIX_SECONDS: Final = 30.0
KEYS_LIMIT: Final = 20_000
READS_KEPT: Final = 1024
"""Reads of one engine and backend that wait for the controller; it never asks for those of an engine without polls."""

ERRORS_KEPT: Final = 256
_SEEN_LIMIT: Final = 20_000
_CHOICES: Final = ("remote", "recompute")


@dataclass(slots=True)
class Flight:
    """Reads in flight as a hook told at `at`."""

    at: float
    count: int
    size: int
    oldest: float


@dataclass(slots=True)
class Gathered:
    """What was gathered of one engine and backend since the controller last asked, and what stays."""

    model: str = ""
    reads: deque[Read] = field(default_factory=lambda: deque(maxlen=READS_KEPT))
    flights: dict[tuple[str, ...], Flight] = field(default_factory=dict)  # by process
    mix: dict[str, float] = field(default_factory=dict)  # class -> requests, faded
    gpu_seconds: float = 0.0  # of the requests' TTFT, faded
    met: list[float] = field(default_factory=lambda: [0.0, 0.0])  # others they met without a first token; requests
    mixed_at: float = 0.0
    errors: dict[str, deque[float]] = field(
        default_factory=lambda: {choice: deque(maxlen=ERRORS_KEPT) for choice in _CHOICES}
    )
    would: int = 0  # requests that `auto` would have refused, under `observe`
    would_gain: float = 0.0  # seconds that refusing them would have gained, as projected

    def flight(self, now: float) -> tuple[int, int, float]:
        """Reads in flight, their bytes, and the age of the oldest, as last told: the hook may not tell every end."""
        told = list(self.flights.values())  # a scrape asks on another thread
        live = [each for each in told if now - each.at <= FRESH_SECONDS]
        oldest = max((each.oldest for each in live), default=0.0)
        return sum(each.count for each in live), sum(each.size for each in live), oldest

    def taken(self) -> tuple[Read, ...]:
        """The reads since this was last asked."""
        reads = tuple(self.reads)
        self.reads.clear()
        return reads

    def rates(self, now: float) -> dict[str, float]:
        """Requests per second by class over about the last `MIX_SECONDS`."""
        self._fade(now)
        return {name: count / MIX_SECONDS for name, count in self.mix.items()}

    def waiting(self, now: float) -> float:
        """Others that a request finds wanting the GPU, on average over about as long.

        By Little's law, which counts the request itself: right where requests arrive by chance. Where one client asks
        again and again nobody else waits, so not more than the others that requests did meet when they arrived.
        """
        self._fade(now)
        others, requests = self.met
        return min(self.gpu_seconds / MIX_SECONDS, others / requests) if requests > 0.0 else 0.0

    def occupied(self, seconds: float, others: int, now: float) -> None:
        """Counts the time for which a request wanted the GPU, and the others without a first token when it came."""
        self._fade(now)
        self.gpu_seconds += seconds
        self.met = [self.met[0] + others, self.met[1] + 1.0]

    def count(self, class_: str, now: float) -> None:
        """Counts a request of a class."""
        self._fade(now)
        self.mix[class_] = self.mix.get(class_, 0.0) + 1.0

    def _fade(self, now: float) -> None:
        if now - self.mixed_at < 1.0:
            return
        keep = max(0.0, 1.0 - (now - self.mixed_at) / MIX_SECONDS)
        self.mix = {name: count * keep for name, count in self.mix.items() if count * keep > 0.05}
        self.gpu_seconds *= keep
        self.met = [each * keep for each in self.met]
        self.mixed_at = now


class Gatherer:
    """Everything gathered, by engine and backend."""

    def __init__(self) -> None:
        self.found: OrderedDict[Key, Gathered] = OrderedDict()
        self._counted: OrderedDict[str, int] = OrderedDict()  # request's span -> fetches of it that were taken
        self._told: OrderedDict[tuple[str, ...], tuple[str, ...]] = OrderedDict()  # process -> backends it told of

    def of(self, key: Key) -> Gathered:
        """What there is of an engine and backend, made when it is new."""
        held = self.found.get(key)
        if held is None:
            while len(self.found) >= KEYS_LIMIT:
                self.found.popitem(last=False)
            held = self.found[key] = Gathered()
        return held

    def take(self, record: RequestRecord, costs: Costs | None, now: float) -> None:
        """Takes a joined request, or what came to one later; only fetches that are new count."""
        if not record.backend or record.handoff:
            return
        known = self._counted.get(record.span_id)
        held = self.of((record.engine_id, record.backend))
        held.model = record.model or held.model
        for fetch in record.fetches[known or 0 :]:
            held.reads.append(_read(record, fetch, now))
        if known is None and not record.aborted and record.ttft is not None:
            if record.tokens_matched > 0 or record.decision in (semconv.DECISION_SKIP, semconv.DECISION_DECLINE):
                held.count(record.class_, now)
            if capability_of_label(record.backend).aside:  # else whoever waits may wait for a read
                held.occupied(record.gpu_seconds, record.waiting, now)
            if costs is not None:
                _judge(held, record, costs)
        self._counted[record.span_id] = len(record.fetches)
        while len(self._counted) > _SEEN_LIMIT:
            self._counted.popitem(last=False)

    def told(self, engine_id: str, process: tuple[str, ...], text: object, now: float) -> None:
        """Takes `semconv.HOOK_READS` of a hook's export; what cannot be read is left out."""
        told = _parse(text)
        if told is None:
            return
        for backend in self._told.pop((engine_id, *process), ()):
            gone = self.found.get((engine_id, backend))
            if gone is not None and backend not in told:
                gone.flights.pop(process, None)
        if told:
            self._told[(engine_id, *process)] = tuple(told)
            while len(self._told) > KEYS_LIMIT:
                self._told.popitem(last=False)
        for backend, (count, size, oldest) in told.items():
            held = self.of((engine_id, backend))
            held.flights[process] = Flight(now, int(count), int(size), oldest)
            if len(held.flights) > 64:
                held.flights.pop(next(iter(held.flights)))


def _read(record: RequestRecord, fetch: FetchRecord, now: float) -> Read:
    return Read(
        at=now,
        seconds=record.lookup + fetch.seconds,
        prompt_tokens=record.prompt_tokens,
        local_tokens=record.tokens_local,
        loaded_tokens=fetch.tokens,
        bytes=_sent(record, fetch),
        inflight=max(fetch.inflight, 1),
        running=record.running,
        rtt=fetch.network_rtt if fetch.network_rtt is not None else record.rtt,
        ok=fetch.outcome != semconv.OUTCOME_FAILED,
        tagged=record.reason == gate.TRICKLE,
        waited=_waited(record, fetch),
    )


def _sent(record: RequestRecord, fetch: FetchRecord) -> float:
    """Bytes that the store sent: where the lookup moves the data, what vLLM holds itself among them."""
    if capability_of_label(record.backend).lookup_moves_data and fetch.tokens:
        return float(fetch.bytes) * (fetch.tokens + record.tokens_local) / fetch.tokens
    return float(fetch.bytes)


def _waited(record: RequestRecord, fetch: FetchRecord) -> float:
    """Of a read's time, what may have been a wait for steps of the engine.

    Each poll of a lookup is in a step; a connector asks in one and hears in the next. The end of a load, which the
    workers time themselves, is seen in a step, too.
    """
    polls = record.lookup_polls - 1
    lookup = min(2.0 / polls, 1.0) * record.lookup if polls > 0 else 0.0
    return lookup + max(fetch.seconds - max(fetch.ranks.values(), default=fetch.seconds), 0.0)


def _judge(held: Gathered, record: RequestRecord, costs: Costs) -> None:
    """How far the projection was off, and under `observe` what refusing would have gained."""
    c = record.prompt_tokens - record.tokens_local
    waits = record.intake + record.queue + record.slot + record.resume
    loaded = record.tokens_loaded
    rest = costs.prefill(record.prompt_tokens, max(c - loaded, 1), record.running)
    full = costs.prefill(record.prompt_tokens, c, record.running)
    ttft = record.ttft or 0.0
    if loaded > 0 and record.fetches:
        last = record.fetches[-1]
        read = costs.lookup(_sent(record, last)) + costs.fetch_seconds(last.bytes)
        projected, choice = waits + read + rest, "remote"
    else:
        projected, choice = waits + record.lookup + full, "recompute"
    if ttft > 0.0:
        held.errors[choice].append(abs(ttft - projected) / ttft)
    if record.reason.startswith("would-"):
        held.would += 1
        held.would_gain += record.lookup + record.fetch - (full - rest)


def _parse(text: object) -> dict[str, tuple[float, float, float]] | None:
    if not isinstance(text, str):
        return None
    try:
        data: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, Mapping) or len(data) > 64:
        return None
    found: dict[str, tuple[float, float, float]] = {}
    for backend, value in data.items():
        if isinstance(value, list) and len(value) == 3 and all(_sane(each) for each in value):
            found[str(backend)[:256]] = (value[0], value[1], value[2])
    return found


def _sane(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < 1e15
