"""Text of a scrape: Prometheus 0.0.4 or OpenMetrics 1.0, which alone has exemplars.

Written here and not by prometheus_client, because that builds each line anew at every scrape (docs/adr/0026): here a
series keeps its text and only the number is put behind it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from guard.metrics.tables import Exemplar, Row, Table
from guard.semconv import Metric

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def head(metric: Metric, *, openmetrics: bool) -> str:
    """The HELP and TYPE lines of a metric."""
    name = metric.name
    if openmetrics and metric.kind == "counter":
        name = name.removesuffix("_total")
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        text = text.replace('"', r"\"")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.kind}\n"


def table_lines(table: Table, *, openmetrics: bool) -> Iterator[str]:
    """The lines of a counter or histogram; may run while others count."""
    metric = table.metric
    for row in list(table.rows.values()):
        if metric.buckets:
            row.text = row.text or _histogram_text(metric, row)
            yield from _histogram_lines(row, openmetrics=openmetrics)
        else:
            row.text = row.text or (series(metric.name, metric.labels, row.labels),)
            yield f"{row.text[0]}{number(row.values[0])}\n"


def series(name: str, labels: Iterable[str], values: Iterable[str], more: str = "") -> str:
    """`name{label="value",...} `: a line without its number."""
    pairs = [f'{label}="{value.translate(_ESCAPES)}"' for label, value in zip(labels, values, strict=True)]
    if more:
        pairs.append(more)
    return f"{name}{{{','.join(pairs)}}} " if pairs else f"{name} "


def number(value: float) -> str:
    """A value as both formats write it."""
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(value)
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"


def _histogram_text(metric: Metric, row: Row) -> tuple[str, ...]:
    edges = [*(repr(float(edge)) for edge in metric.buckets), "+Inf"]
    buckets = [series(f"{metric.name}_bucket", metric.labels, row.labels, f'le="{edge}"') for edge in edges]
    ends = [series(f"{metric.name}_{end}", metric.labels, row.labels) for end in ("count", "sum")]
    return (*buckets, *ends)


def _histogram_lines(row: Row, *, openmetrics: bool) -> Iterator[str]:
    *counts, total = tuple(row.values)
    exemplars = dict(row.exemplars) if openmetrics and row.exemplars else {}
    seen = 0
    for index, count in enumerate(counts):
        seen += int(count)
        mark = _exemplar_text(exemplars[index]) if index in exemplars else ""
        yield f"{row.text[index]}{seen}{mark}\n"
    yield f"{row.text[-2]}{seen}\n"
    yield f"{row.text[-1]}{number(total)}\n"


def _exemplar_text(exemplar: Exemplar) -> str:
    return f' # {{trace_id="{exemplar.trace_id}"}} {number(exemplar.value)} {exemplar.unix_seconds:.3f}'
