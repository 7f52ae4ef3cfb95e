"""The series of counters and histograms, within a budget of samples.

One scrape holds about `SCRAPE_SAMPLES` samples. Gauges come first, since they tell engines apart; what they leave is
for counters and histograms (never less than `TABLE_SAMPLES`), of which one metric may take a quarter. A label set
that finds no room is counted under `engine_id="other"` (`target="other"`), for which a fifth is kept free, so that
sums over engines stay right; when there is no room for that either, under `other` in every label.
"""

from bisect import bisect_left
from typing import Final, NamedTuple

from guard.metrics.labels import OTHER
from guard.semconv import Metric

SCRAPE_SAMPLES: Final = 32_000
TABLE_SAMPLES: Final = 6_400
_FREE_FOR_FOLDED: Final = 0.2
_FOLDS: Final = ("engine_id", "target")
_SHARE: Final = 4


class Exemplar(NamedTuple):
    """A value that was counted into a bucket, the trace it belongs to, and its Unix time in seconds."""

    trace_id: str
    value: float
    unix_seconds: float


class Row:
    """One label set: a counter's value, or a histogram's bucket counts and sum; exemplars by bucket."""

    __slots__ = ("exemplars", "labels", "text", "values")

    def __init__(self, labels: tuple[str, ...], width: int) -> None:
        self.labels = labels
        self.values = [0.0] * width
        self.exemplars: dict[int, Exemplar] = {}
        self.text: tuple[str, ...] = ()  # the lines without their values, made by the first scrape


class Budget:
    """Samples that tables hold and may hold."""

    def __init__(self) -> None:
        self.used = 0
        self.allowed = SCRAPE_SAMPLES

    def leave(self, gauges: int) -> None:
        """Gives the tables what `gauges` samples leave of a scrape."""
        self.allowed = max(TABLE_SAMPLES, SCRAPE_SAMPLES - gauges)

    @property
    def keep(self) -> float:
        """The share of the tables' series that may stay; 1 when they are within the budget."""
        return 1.0 if self.used <= self.allowed else self.allowed * (1.0 - _FREE_FOR_FOLDED) / self.used


class Table:
    """The series of one metric."""

    def __init__(self, metric: Metric, budget: Budget) -> None:
        self.metric = metric
        self.rows: dict[tuple[str, ...], Row] = {}
        self.samples = 3 + len(metric.buckets) if metric.buckets else 1  # buckets with +Inf, sum, count
        self._width = 2 + len(metric.buckets) if metric.buckets else 1
        self._budget = budget

    def row(self, labels: tuple[str, ...]) -> Row:
        """The row of a label set, made when it is new."""
        row = self.rows.get(labels)
        if row is None:
            if not self._room(1.0 - _FREE_FOR_FOLDED):
                names = self.metric.labels
                labels = tuple(OTHER if name in _FOLDS else value for name, value in zip(names, labels, strict=True))
                if labels not in self.rows and not self._room(1.0):
                    labels = (OTHER,) * len(labels)
            row = self.rows.get(labels)
            if row is None:
                row = self.rows[labels] = Row(labels, self._width)
                self._budget.used += self.samples
        return row

    def observe(self, row: Row, value: float, exemplar: Exemplar | None = None) -> None:
        """Counts one value of a histogram; Prometheus' buckets hold what is <= their edge."""
        bucket = bisect_left(self.metric.buckets, value)
        row.values[bucket] += 1.0
        row.values[-1] += value
        if exemplar is not None:
            row.exemplars[bucket] = exemplar

    def drop(self, labels: tuple[str, ...]) -> None:
        """Ends a series."""
        if self.rows.pop(labels, None):
            self._budget.used -= self.samples

    def shrink(self, keep: float) -> None:
        """Ends all but the share `keep` of the series that are not folded, those begun first."""
        own = [key for key in self.rows if OTHER not in key]
        for labels in own[: len(own) - int(keep * len(own))]:
            self.drop(labels)

    def _room(self, share: float) -> bool:
        """Whether one more label set fits into `share` of the budget."""
        allowed = self._budget.allowed * share
        mine = (len(self.rows) + 1) * self.samples
        return self._budget.used + self.samples <= allowed and mine <= allowed / _SHARE
