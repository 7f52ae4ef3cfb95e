"""Gauges of one scrape: asked for, bounded, rendered. Each keeps the text of its lines between scrapes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from guard import semconv
from guard.metrics.exposition import number, series
from guard.metrics.labels import OTHER, Labels
from guard.semconv import Metric

GaugeSource = Callable[[], Iterable[tuple[Metric, Sequence[str], float]]]

_PER_ENGINE_BACKEND: Final = 4096
_DETAIL: Final = 1024
SERIES_LIMITS: Final = {
    metric.name: _PER_ENGINE_BACKEND
    for metric in (
        semconv.OFFLOAD_MODE, semconv.CONTROLLER_STATE, semconv.KV_FETCH_INFLIGHT, semconv.KV_FETCH_OLDEST_AGE,
        semconv.SLA_ATTAINABLE,
    )
}  # fmt: skip
"""Most series of a gauge, `_DETAIL` where it is not named; those beyond share `engine_id="other"`."""

_SUMMED: Final = frozenset({semconv.KV_FETCH_INFLIGHT.name})
_LEAST: Final = frozenset({semconv.SLA_ATTAINABLE.name, semconv.READS_LIMIT.name})
_CACHED: Final = 65_536

_Key = tuple[str, tuple[str, ...]]
_Lines = list[tuple[str, float]]


class Gauges:
    """Turns what `source` yields into lines. What does not fit is folded by sum, least or (else) greatest."""

    def __init__(self, source: GaugeSource, labels: Labels) -> None:
        self._source = source
        self._labels = labels
        self._texts: dict[_Key, tuple[str, str]] = {}

    def ask(self, now: float) -> dict[str, _Lines]:
        """Metric name -> (text, value) of its series."""
        found: dict[str, _Lines] = {}
        folded: dict[str, dict[str, float]] = {}
        texts, limits = self._texts, SERIES_LIMITS
        for metric, values, value in self._source():
            name = metric.name
            lines = found.get(name)
            if lines is None:
                lines = found[name] = []
            key = (name, tuple(values))
            text, shared = texts.get(key) or self._keep(metric, key, now)
            if text and len(lines) < limits.get(name, _DETAIL):
                lines.append((text, value))
            else:
                beyond = folded.setdefault(name, {})
                beyond[shared] = _fold(name, beyond[shared], value) if shared in beyond else value
        for name, beyond in folded.items():
            found[name].extend(beyond.items())
        return found

    def forget(self) -> None:
        """Drops the kept texts, so that the labels of the next scrape are admitted (and seen) anew."""
        self._texts.clear()

    def _keep(self, metric: Metric, key: _Key, now: float) -> tuple[str, str]:
        """The text of a series, empty when a label of it is folded already, and the text that it folds into."""
        labels = self._labels.admit(metric.labels, key[1], now)
        own = OTHER not in labels
        shared = series(metric.name, metric.labels, _folded(metric, labels) if own else labels)
        kept = (series(metric.name, metric.labels, labels) if own else "", shared)
        if len(self._texts) < _CACHED:
            self._texts[key] = kept
        return kept


def _folded(metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
    """`other` for what there may be many of; a metric's fixed lists (mode, choice, ...) stay apart."""
    wide = ("engine_id", "vllm_instance", "engine", "target", "class")
    return tuple(OTHER if name in wide else value for name, value in zip(metric.labels, labels, strict=True))


def _fold(name: str, one: float, other: float) -> float:
    if name in _SUMMED:
        return one + other
    return min(one, other) if name in _LEAST else max(one, other)


def lines(texts: Iterable[tuple[str, float]]) -> Iterable[str]:
    """The lines of one gauge."""
    return (f"{text}{number(value)}\n" for text, value in texts)
