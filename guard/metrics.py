"""The service's Prometheus metrics: counted as records arrive, collected when scraped.

Labels are bounded by construction. Each label holds at most `LABEL_LIMITS[name]` values; a new value beyond that, or
one that is not a plain short text, counts as `other`. A value that was not seen for `IDLE_SECONDS` makes room, and its
series go. Histograms are cumulative only when scraped, so that counting costs one bisection and one addition.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from guard import __version__, semconv
from guard.semconv import Metric
from guard.wire import AttributeValue, FetchRecord, RequestRecord

OTHER: Final = "other"
LABEL_LIMITS: Final[Mapping[str, int]] = {
    "model_name": 64, "engine_id": 1024, "backend": 64, "class": 64, "decision": 8, "reason": 64, "outcome": 8,
    "kind": 16, "status": 32, "cause": 4,
}  # fmt: skip
SERIES_LIMIT: Final = 2048
"""Most label sets of one metric; beyond it all of them count under `other`."""

IDLE_SECONDS: Final = 3600.0
_VALUE_LIMIT: Final = 256
_PROCESS_LIMIT: Final = 16_384

_CACHE_LIMIT: Final = 8192

_Key = tuple[str, str, str, str, str, str]
_KEY: Final = ("model_name", "engine_id", "backend", "class", "decision", "reason")

GaugeSource = Callable[[], Iterable[tuple[Metric, Sequence[str], float]]]


class _Labels:
    """The values that one label may have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[str, float] = {}

    def admit(self, value: str, now: float) -> str:
        """`value`, or `other` when there is no room for it."""
        if value not in self._seen and (
            len(self._seen) >= self._limit or len(value) > _VALUE_LIMIT or not value.isprintable()
        ):
            return OTHER
        self._seen[value] = now
        return value

    def forget(self, before: float) -> set[str]:
        """Drops the values last seen before `before`, and says which."""
        gone = {value for value, seen in self._seen.items() if seen < before}
        for value in gone:
            del self._seen[value]
        return gone


class _Table:
    """The series of one metric: label values -> [bucket counts..., sum] or [value]."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.rows: dict[tuple[str, ...], list[float]] = {}
        self._width = len(metric.buckets) + 2 if metric.buckets else 1

    def row(self, labels: tuple[str, ...]) -> list[float]:
        """The row of a label set, made when it is new."""
        row = self.rows.get(labels)
        if row is None:
            if len(self.rows) >= SERIES_LIMIT:
                labels = (OTHER,) * len(labels)
            row = self.rows.setdefault(labels, [0.0] * self._width)
        return row

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        """Counts one value of a histogram; Prometheus' buckets hold what is <= their edge."""
        row = self.row(labels)
        row[bisect_left(self.metric.buckets, value)] += 1.0
        row[-1] += value

    def family(self) -> Family:
        """The metric as Prometheus shows it."""
        name, kind, text, labels, buckets = self.metric
        if kind == "histogram":
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for values, row in list(self.rows.items()):
                now = tuple(row)
                histogram.add_metric(values, _cumulative(buckets, now), now[-1])
            return histogram
        counter = CounterMetricFamily(name, text, labels=labels)
        for values, row in list(self.rows.items()):
            counter.add_metric(values, row[0])
        return counter


@dataclass(slots=True)
class _Admitted:
    """The labels of a kind of request as they are shown, and its row of `kvguard_decisions_total`."""

    labels: tuple[str, str, str, str]
    decision: tuple[str, ...]
    requests: list[float]
    seen: float


class Telemetry(Collector):
    """Everything the service counts. `clock` is monotonic seconds; `gauges` is asked at every scrape."""

    def __init__(self, clock: Callable[[], float], gauges: GaugeSource = lambda: ()) -> None:
        self._clock = clock
        self._gauges = gauges
        self._tables = {
            metric.name: _Table(metric) for metric in semconv.METRICS if metric.kind in ("histogram", "counter")
        }
        self._labels = {name: _Labels(limit) for name, limit in LABEL_LIMITS.items()}
        self._admitted: dict[_Key, _Admitted] = {}  # saves admitting the same six labels for every request
        self._processes: dict[tuple[str, ...], tuple[int, int]] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def observe(self, record: RequestRecord) -> None:
        """Counts one joined request; an aborted one does not count as TTFT."""
        admitted = self._admitted_of(record)
        labels, decision = admitted.labels, admitted.decision
        admitted.requests[0] += 1
        for fetch in record.fetches:
            self._fetch(labels, fetch, admitted.seen)
        if record.lookup > 0:
            self._histogram(semconv.KV_LOOKUP_DURATION, labels, record.lookup)
        if record.fetches:
            self._histogram(semconv.KV_MISS_LATENCY, labels, record.miss_latency)
            self._histogram(semconv.KV_EXPOSED_WAIT, labels, record.exposed_wait)
        if record.ttft is not None and not record.aborted:
            self._histogram(semconv.TTFT_SECONDS, decision, record.ttft)
            if record.residual is not None:
                self._histogram(semconv.TTFT_RESIDUAL, labels[:2], abs(record.residual))

    def amend(self, record: RequestRecord) -> None:
        """Counts the fetches that came after their request was counted; those that outlived it are the slowest."""
        for fetch in record.fetches:
            if not fetch.counted:
                admitted = self._admitted_of(record)
                self._fetch(admitted.labels, fetch, admitted.seen)

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Adds to a counter. `by` of 0 makes the series appear."""
        now = self._clock()
        values = tuple(self._admit(name, value, now) for name, value in zip(metric.labels, labels, strict=True))
        self._tables[metric.name].row(values)[0] += by

    def set_total(self, metric: Metric, *labels: str, value: float) -> None:
        """Sets a counter to a running total that is kept elsewhere."""
        now = self._clock()
        values = tuple(self._admit(name, text, now) for name, text in zip(metric.labels, labels, strict=True))
        self._tables[metric.name].row(values)[0] = value

    def hook_totals(self, engine_id: str, process: tuple[str, ...], resource: Mapping[str, AttributeValue]) -> None:
        """Takes a hook's running totals; `process` tells the processes of an engine apart.

        A total that went down is a new process under the old name: its total is all new. What the engine's series
        shows therefore never falls and counts nothing twice.
        """
        dropped = _total(resource.get(semconv.RECORDS_DROPPED))
        errors = _total(resource.get(semconv.HOOK_ERRORS))
        if dropped is None and errors is None:
            return
        key = (engine_id, *process)
        before = self._processes.pop(key, (0, 0))
        after = (before[0] if dropped is None else dropped, before[1] if errors is None else errors)
        self._processes[key] = after
        while len(self._processes) > _PROCESS_LIMIT:
            del self._processes[next(iter(self._processes))]
        for metric, old, new in zip(
            (semconv.HOOK_RECORDS_DROPPED, semconv.HOOK_ERRORS_TOTAL), before, after, strict=True
        ):
            self.count(metric, engine_id, by=new - old if new >= old else new)

    def forget_idle(self) -> None:
        """Drops the label values, with their series, that were not seen for `IDLE_SECONDS`."""
        before = self._clock() - IDLE_SECONDS
        for key, admitted in self._admitted.items():
            if admitted.seen >= before:
                self._admit_all(key, admitted.seen)
        self._admitted.clear()
        gone = {name: values for name, bound in self._labels.items() if (values := bound.forget(before))}
        if not gone:
            return
        for table in self._tables.values():
            bounds = [gone.get(name, set()) for name in table.metric.labels]
            for labels in list(table.rows):
                if any(value in values for value, values in zip(labels, bounds, strict=True)):
                    del table.rows[labels]

    def collect(self) -> Iterator[Family]:
        """The metrics in the order of `semconv.METRICS`; may run on another thread than those who count."""
        gauges: dict[str, list[tuple[Sequence[str], float]]] = {semconv.BUILD_INFO.name: [((__version__,), 1.0)]}
        for metric, labels, value in self._gauges():
            gauges.setdefault(metric.name, []).append((labels, value))
        for metric in semconv.METRICS:
            if table := self._tables.get(metric.name):
                yield table.family()
            else:
                gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in gauges.get(metric.name, ()):
                    gauge.add_metric(labels, value)
                yield gauge

    def _admit(self, name: str, value: str, now: float) -> str:
        return self._labels[name].admit(value, now)

    def _admitted_of(self, record: RequestRecord) -> "_Admitted":
        now = self._clock()
        key = (record.model, record.engine_id, record.backend, record.class_, record.decision, record.reason)
        admitted = self._admitted.get(key) or self._admit_all(key, now)
        admitted.seen = now
        return admitted

    def _fetch(self, labels: tuple[str, ...], fetch: FetchRecord, now: float) -> None:
        fetch.counted = True
        outcome = self._admit("outcome", fetch.outcome, now)
        self._histogram(semconv.KV_FETCH_DURATION, (*labels, outcome), fetch.seconds)
        if fetch.outcome == semconv.OUTCOME_OK and fetch.bytes > 0:
            self._tables[semconv.KV_FETCH_BYTES.name].row(labels)[0] += fetch.bytes

    def _admit_all(self, key: _Key, now: float) -> "_Admitted":
        model, engine, backend, class_, decision, reason = (
            self._admit(name, value, now) for name, value in zip(_KEY, key, strict=True)
        )
        labels = (model, engine, backend, class_)
        row = self._tables[semconv.DECISIONS_TOTAL.name].row((model, engine, backend, decision, reason))
        admitted = _Admitted(labels, (*labels, decision), row, now)
        if len(self._admitted) < _CACHE_LIMIT:
            self._admitted[key] = admitted
        return admitted

    def _histogram(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        if value >= 0.0:  # neither broken nor NaN
            self._tables[metric.name].observe(labels, value)


def _cumulative(edges: Sequence[float], row: Sequence[float]) -> list[tuple[str, float]]:
    total, result = 0.0, []
    for edge, count in zip((*edges, inf), row, strict=False):
        total += count
        result.append((str(floatToGoString(edge)), total))  # type: ignore[no-untyped-call]
    return result


def _total(value: AttributeValue | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
