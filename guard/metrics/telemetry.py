"""What the service counts. Counting a request costs a few dictionary look-ups and one bisection per histogram."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from guard import __version__, semconv
from guard.metrics import exposition
from guard.metrics.gauges import Gauges, GaugeSource, lines
from guard.metrics.labels import IDLE_SECONDS, Labels
from guard.metrics.tables import Budget, Exemplar, Row, Table
from guard.semconv import Metric
from guard.wire import AttributeValue, FetchRecord, RequestRecord

_PROCESS_LIMIT: Final = 16_384
_CACHE_LIMIT: Final = 8192
_EXEMPLAR_LIMIT: Final = 64

_Key = tuple[str, str, str, str, str, str]
_KEY: Final = ("model_name", "engine_id", "backend", "class", "decision", "reason")


@dataclass(slots=True)
class _Admitted:
    """The labels of a kind of request as they are shown, its rows, and when it was last seen."""

    labels: tuple[str, str, str, str]
    requests: Row
    rows: dict[str, Row]  # by metric
    fetches: dict[str, Row]  # of fetch durations, by outcome
    decision: str
    seen: float


class Telemetry:
    """Everything the service counts. `clock` is monotonic seconds; `gauges` is asked at every scrape."""

    def __init__(self, clock: Callable[[], float], gauges: GaugeSource = lambda: ()) -> None:
        self._clock = clock
        self._labels = Labels()
        self._budget = Budget()
        self._gauges = Gauges(gauges, self._labels)
        self._tables = {
            metric.name: Table(metric, self._budget)
            for metric in semconv.METRICS
            if metric.kind in ("histogram", "counter")
        }
        self._admitted: dict[_Key, _Admitted] = {}  # saves admitting the same six labels for every request
        self._processes: dict[tuple[str, ...], tuple[int, int]] = {}

    def observe(self, record: RequestRecord) -> None:
        """Counts one joined request; an aborted one does not count as TTFT."""
        admitted = self._admitted_of(record)
        admitted.requests.values[0] += 1
        trace_id = _shown(record.trace_id)
        for fetch in record.fetches:
            self._fetch(admitted, trace_id, fetch)
        if record.lookup > 0:
            self._histogram(semconv.KV_LOOKUP_DURATION, admitted, record.lookup)
        if record.fetches:
            self._histogram(semconv.KV_MISS_LATENCY, admitted, record.miss_latency)
            self._histogram(semconv.KV_EXPOSED_WAIT, admitted, record.exposed_wait)
        if record.ttft is not None and not record.aborted:
            end = record.arrival_ns / 1e9 + record.ttft
            exemplar = Exemplar(trace_id, record.ttft, end) if trace_id else None
            self._histogram(semconv.TTFT_SECONDS, admitted, record.ttft, exemplar)
            if record.residual is not None:
                self._histogram(semconv.TTFT_RESIDUAL, admitted, abs(record.residual))

    def amend(self, record: RequestRecord) -> None:
        """Counts the fetches that came after their request was counted; those that outlived it are the slowest."""
        for fetch in record.fetches:
            if not fetch.counted:
                self._fetch(self._admitted_of(record), _shown(record.trace_id), fetch)

    def observe_value(self, metric: Metric, *labels: str, value: float) -> None:
        """Counts one value of a histogram; one that is negative, infinite or NaN is broken and does not count."""
        if 0.0 <= value < inf:
            table = self._tables[metric.name]
            table.observe(table.row(self._labels.admit(metric.labels, labels, self._clock())), value)

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Adds to a counter. `by` of 0 makes the series appear."""
        self._counter(metric, labels).values[0] += by

    def set_total(self, metric: Metric, *labels: str, value: float) -> None:
        """Sets a counter to a running total that is kept elsewhere."""
        self._counter(metric, labels).values[0] = value

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
        """Drops the label values, with their series, that were not seen for `IDLE_SECONDS`; keeps to the budget."""
        before = self._clock() - IDLE_SECONDS
        for key, admitted in self._admitted.items():
            if admitted.seen >= before:
                self._labels.admit(_KEY, key, admitted.seen)
        self._admitted.clear()
        self._gauges.forget()
        gone = self._labels.forget(before)
        for table in self._tables.values():
            bounds = [gone.get(name, set()) for name in table.metric.labels]
            for labels in list(table.rows) if gone else ():
                if any(value in values for value, values in zip(labels, bounds, strict=True)):
                    table.drop(labels)
        if (keep := self._budget.keep) < 1.0:
            for table in self._tables.values():
                table.shrink(keep)

    def render(self, *, openmetrics: bool = False) -> bytes:
        """One scrape, metrics in the order of `semconv.METRICS`; may run on another thread than those who count."""
        gauges = self._gauges.ask(self._clock())
        self._budget.leave(sum(map(len, gauges.values())))
        version = exposition.series(semconv.BUILD_INFO.name, semconv.BUILD_INFO.labels, (__version__,))
        gauges[semconv.BUILD_INFO.name] = [(version, 1.0)]
        parts = []
        for metric in semconv.METRICS:
            parts.append(exposition.head(metric, openmetrics=openmetrics))
            if table := self._tables.get(metric.name):
                parts.extend(exposition.table_lines(table, openmetrics=openmetrics))
            else:
                parts.extend(lines(gauges.get(metric.name, ())))
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode()

    def collect(self) -> Iterator[Family]:
        """One scrape, parsed."""
        yield from text_string_to_metric_families(self.render().decode())

    def _counter(self, metric: Metric, labels: tuple[str, ...]) -> Row:
        return self._tables[metric.name].row(self._labels.admit(metric.labels, labels, self._clock()))

    def _admitted_of(self, record: RequestRecord) -> _Admitted:
        now = self._clock()
        key = (record.model, record.engine_id, record.backend, record.class_, record.decision, record.reason)
        admitted = self._admitted.get(key) or self._admit_all(key, now)
        admitted.seen = now
        return admitted

    def _admit_all(self, key: _Key, now: float) -> _Admitted:
        model, engine, backend, class_, decision, reason = self._labels.admit(_KEY, key, now)
        row = self._tables[semconv.DECISIONS_TOTAL.name].row((model, engine, backend, decision, reason))
        admitted = _Admitted((model, engine, backend, class_), row, {}, {}, decision, now)
        if len(self._admitted) < _CACHE_LIMIT:
            self._admitted[key] = admitted
        return admitted

    def _fetch(self, admitted: _Admitted, trace_id: str, fetch: FetchRecord) -> None:
        fetch.counted = True
        if 0.0 <= fetch.seconds < inf:
            row = admitted.fetches.get(fetch.outcome) or self._fetch_row(admitted, fetch.outcome)
            end = fetch.start_ns / 1e9 + fetch.seconds
            exemplar = Exemplar(trace_id, fetch.seconds, end) if trace_id else None
            self._tables[semconv.KV_FETCH_DURATION.name].observe(row, fetch.seconds, exemplar)
        if fetch.outcome == semconv.OUTCOME_OK and fetch.bytes > 0:
            self._row(semconv.KV_FETCH_BYTES, admitted).values[0] += fetch.bytes

    def _fetch_row(self, admitted: _Admitted, outcome: str) -> Row:
        (shown,) = self._labels.admit(("outcome",), (outcome,), admitted.seen)
        row = self._tables[semconv.KV_FETCH_DURATION.name].row((*admitted.labels, shown))
        if shown == outcome:  # what is folded is not remembered: it may be anything
            admitted.fetches[outcome] = row
        return row

    def _histogram(self, metric: Metric, admitted: _Admitted, value: float, exemplar: Exemplar | None = None) -> None:
        if 0.0 <= value < inf:  # neither broken nor NaN
            self._tables[metric.name].observe(self._row(metric, admitted), value, exemplar)

    def _row(self, metric: Metric, admitted: _Admitted) -> Row:
        row = admitted.rows.get(metric.name)
        if row is None:
            labels: tuple[str, ...] = admitted.labels
            if metric is semconv.TTFT_SECONDS:
                labels = (*labels, admitted.decision)
            row = admitted.rows[metric.name] = self._tables[metric.name].row(labels[: len(metric.labels)])
        return row


def _shown(trace_id: str) -> str:
    """The trace id as exemplars show it; empty where it is none: it is what spans said, and goes into the text."""
    plain = 0 < len(trace_id) <= _EXEMPLAR_LIMIT and trace_id.isalnum() and trace_id.isascii()
    return trace_id if plain else ""


def _total(value: AttributeValue | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
