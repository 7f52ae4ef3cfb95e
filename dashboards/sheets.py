"""Contact sheets: each dashboard drawn with matplotlib from the same queries. Not Grafana's rendering: a likeness."""

import math
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from alerts.servers import Prometheus
from dashboards import history
from dashboards.__main__ import DASHBOARDS
from dashboards.queries import filled, legend, ranged
from dashboards.shapes import Dashboard, Panel

INK, DIM, GRID, CARD, PAGE = "#1f2933", "#6b7785", "#e4e8ec", "#ffffff", "#f3f5f7"
PALETTE = ("#2f9e55", "#d9a400", "#3b7dd8", "#e8590c", "#c92a2a", "#7048b6", "#0c8599", "#a61e4d", "#5c940d", "#868e96")
NAMED = {"green": "#2f9e55", "yellow": "#e0a800", "red": "#d6336c", "blue": "#3b7dd8", "purple": "#7048b6"}
UNIT, ROW = 0.66, 0.30  # inches per column and row of Grafana's grid


def draw_all(folder: Path) -> None:
    """Draws every dashboard over the planted story into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, history.server(Path(directory)) as (server, end):
        for dashboard in DASHBOARDS:
            draw(dashboard, server, end, folder / f"dashboard-{dashboard.uid.removeprefix('kvguard-')}.png")


def draw(dashboard: Dashboard, server: Prometheus, end: float, target: Path) -> None:
    """Draws one dashboard as it looked at `end`."""
    places = dashboard.json()["panels"]
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in places)
    top = 3.2
    width, height = 24 * UNIT, (bottom + top) * ROW
    figure = plt.figure(figsize=(width, height), facecolor=PAGE)
    figure.text(0.012, 1 - 0.9 * ROW / height, dashboard.title, size=17, weight="bold", color=INK, va="center")
    note = (
        f"{dashboard.description} Drawn from the dashboard's own queries over planted data; Grafana draws it otherwise."
    )
    figure.text(0.012, 1 - 2.2 * ROW / height, note, size=9.5, color=DIM, va="center")
    panels = iter(dashboard.panels)
    for place in places:
        grid = place["gridPos"]
        x, y = grid["x"] / 24, 1 - (grid["y"] + grid["h"] + top) * ROW / height
        w, h = grid["w"] / 24, grid["h"] * ROW / height
        if place["type"] == "row":
            figure.text(x + 0.012, y + h / 2, place["title"].upper(), size=9, weight="bold", color=DIM, va="center")
            continue
        _card(figure, next(panels), (x, y, w, h), server, end)
    figure.savefig(target, dpi=80, facecolor=PAGE)
    plt.close(figure)


def _card(figure: Any, panel: Panel, box: tuple[float, float, float, float], server: Prometheus, end: float) -> None:
    x, y, w, h = box
    fw, fh = figure.get_size_inches()
    gap = 0.05
    card = plt.Rectangle(
        (x + gap / fw, y + gap / fh), w - 2 * gap / fw, h - 2 * gap / fh, transform=figure.transFigure, facecolor=CARD,
        edgecolor=GRID, linewidth=1, zorder=0,
    )  # fmt: skip
    figure.add_artist(card)
    figure.text(x + 0.16 / fw, y + h - 0.2 / fh, panel.title, size=9.5, weight="bold", color=INK, va="center")
    left = (
        0.62 if panel.kind in ("timeseries", "heatmap", "xychart") else 2.3 if panel.kind == "state-timeline" else 0.1
    )
    below = (
        0.62
        if panel.kind in ("timeseries", "xychart")
        else 0.34
        if panel.kind in ("heatmap", "state-timeline")
        else 0.1
    )
    axes = figure.add_axes((x + left / fw, y + below / fh, w - (left + 0.2) / fw, h - (below + 0.36) / fh))
    axes.set_facecolor(CARD)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=7.5, colors=DIM)
    _KINDS[panel.kind](axes, panel, server, end)


def _series(panel: Panel, server: Prometheus, end: float) -> list[tuple[str, list[float], list[float]]]:
    found = []
    for query in panel.queries:
        for one in ranged(server, query.expr, end - history.MINUTES * 60, end):
            times, values = zip(*one["values"], strict=True)
            found.append((legend(query.legend, one["metric"]), list(map(_time, times)), list(map(float, values))))
    return found


def _time(seconds: float) -> float:
    return seconds / 86400.0  # matplotlib counts days of Unix time


def _lines(axes: Axes, panel: Panel, server: Prometheus, end: float) -> None:
    found = _series(panel, server, end)
    if panel.stacked and found:
        stamps = sorted({t for _, times, _ in found for t in times})
        rows = [[dict(zip(times, values, strict=True)).get(t, 0.0) for t in stamps] for _, times, values in found]
        rows = [[0.0 if math.isnan(v) else v for v in row] for row in rows]
        colours = [PALETTE[n % len(PALETTE)] for n in range(len(rows))]
        axes.stackplot(stamps, rows, labels=[name for name, _, _ in found], colors=colours, alpha=0.75, linewidth=0)
    else:
        for number, (name, times, values) in enumerate(found):
            style = "--" if number >= len(PALETTE) else "-"
            axes.plot(times, values, label=name, color=PALETTE[number % len(PALETTE)], linewidth=1.5, linestyle=style)
        if panel.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.minorticks_off()
        elif found:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _clock(axes, end)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, panel.unit)))
    if found:
        columns = max(1, min(len(found), int(panel.width / 3)))
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.05, -0.11), ncols=columns, fontsize=6.8, frameon=False, labelcolor=DIM,
            handlelength=1.1, columnspacing=1.2, labelspacing=0.25, borderaxespad=0,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=DIM)


def _clock(axes: Axes, end: float) -> None:
    axes.set_xlim(_time(end - history.MINUTES * 60), _time(end))
    axes.xaxis.set_major_locator(mdates.MinuteLocator(byminute=range(0, 60, 10)))
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M"))


def _stat(axes: Axes, panel: Panel, server: Prometheus, end: float) -> None:
    axes.axis("off")
    found = [
        (legend(query.legend, one["metric"]) if query.legend else "", float(one["value"][1]))
        for query in panel.queries
        for one in server.query(filled(query.expr), time=end)
    ]
    for number, (name, value) in enumerate(found):
        colour = NAMED[[c for bound, c in panel.steps if bound is None or value >= bound][-1]]
        x = (number + 0.5) / len(found)
        axes.text(x, 0.52, _shown(value, panel.unit), transform=axes.transAxes, ha="center", va="center", size=22,
                  weight="bold", color=colour)  # fmt: skip
        axes.text(x, 0.14, name, transform=axes.transAxes, ha="center", va="center", size=8, color=DIM)


def _table(axes: Axes, panel: Panel, server: Prometheus, end: float) -> None:
    axes.axis("off")
    rows = []
    for query in panel.queries:
        for one in server.query(filled(query.expr), time=end):
            labels = {k: v for k, v in one["metric"].items() if k not in ("__name__", "instance", "job")}
            rows.append(labels | {"Value": _shown(float(one["value"][1]), panel.unit)})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns = [name for name in columns if name != "Value"] + ["Value"]
    most = int(panel.height * ROW * 72 / 13) - 3
    y = 0.99
    step = 1.0 / (most + 1.5)
    widest = [max([len(name), *(len(row.get(name, "")) for row in rows)]) + 2 for name in columns]
    starts = [sum(widest[:n]) / sum(widest) for n in range(len(columns))]
    for start, name in zip(starts, columns, strict=True):
        axes.text(start, y, name, transform=axes.transAxes, size=7, weight="bold", color=DIM, va="top")
    for row in rows[:most]:
        y -= step
        for start, name in zip(starts, columns, strict=True):
            axes.text(start, y, row.get(name, ""), transform=axes.transAxes, size=7, color=INK, va="top")
    if len(rows) > most:
        axes.text(0, y - step, f"… {len(rows) - most} more", transform=axes.transAxes, size=7, color=DIM, va="top")


def _states(axes: Axes, panel: Panel, server: Prometheus, end: float) -> None:
    rows: dict[str, list[tuple[float, int]]] = {}
    for name, times, values in _series(panel, server, end):
        rows.setdefault(name, []).extend(zip(times, map(int, values), strict=True))
    width = history.STEP / 86400
    for number, name in enumerate(sorted(rows)):
        points = sorted(rows[name])
        begin = 0
        for place in range(1, len(points) + 1):
            if place < len(points) and points[place][1] == points[begin][1]:
                continue
            value = points[begin][1]
            start, stop = points[begin][0], points[place - 1][0] + width
            colour = NAMED[("green", "yellow", "red", "blue", "purple")[value]]
            axes.broken_barh([(start, stop - start)], (number - 0.4, 0.8), facecolors=colour, alpha=0.8)
            if stop - start > 12 * width:
                axes.text(
                    (start + stop) / 2, number, panel.values[value], ha="center", va="center", size=7.5, color="white"
                )
            begin = place
    axes.set_yticks(range(len(rows)), sorted(rows))
    axes.invert_yaxis()
    _clock(axes, end)


def _heat(axes: Axes, panel: Panel, server: Prometheus, end: float) -> None:
    found = ranged(server, panel.queries[0].expr, end - history.MINUTES * 60, end, 60)
    edges = sorted(found, key=lambda one: float(one["metric"]["le"]))
    stamps = sorted({at for one in edges for at, _ in one["values"]})
    cumulative = [[float(dict(map(tuple, one["values"])).get(at, 0)) for at in stamps] for one in edges]
    counts = [cumulative[0]] + [[max(0.0, b - a) for a, b in zip(*pair, strict=True)] for pair in pairwise(cumulative)]
    used = [n for n, row in enumerate(counts) if sum(row)]
    low, high = used[0], used[-1] + 1
    axes.imshow(counts[low:high], origin="lower", aspect="auto", cmap="Oranges", interpolation="nearest",
                extent=(_time(stamps[0]), _time(stamps[-1]), 0, high - low))  # fmt: skip
    axes.set_yticks(
        [n + 0.5 for n in range(high - low)], [_shown(float(edges[n]["metric"]["le"]), "s") for n in range(low, high)]
    )
    _clock(axes, end)


def _against(axes: Axes, panel: Panel, server: Prometheus, end: float) -> None:
    x, y = (
        dict(map(tuple, ranged(server, query.expr, end - history.MINUTES * 60, end)[0]["values"]))
        for query in panel.queries
    )
    shared = sorted(set(x) & set(y))
    axes.scatter(
        [float(x[t]) for t in shared], [float(y[t]) for t in shared], s=14, color=PALETTE[2], alpha=0.7, linewidth=0
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, panel.unit)))
    axes.set_xlabel(panel.queries[0].legend, size=7.5, color=DIM)
    axes.set_ylabel(panel.queries[1].legend, size=7.5, color=DIM)


def _shown(value: float, unit: str) -> str:
    """A number with its unit."""
    if math.isnan(value):
        return "NaN"
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor or (name == "µs" and value):
                return f"{value / factor:.3g} {name}"
        return "0"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "Bps":
        return f"{value / 1e9:.3g} GB/s"
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}") + {"reqps": "/s", "ops": "/s"}.get(unit, "")


_KINDS = {
    "timeseries": _lines, "stat": _stat, "table": _table, "state-timeline": _states, "heatmap": _heat,
    "xychart": _against,
}  # fmt: skip
