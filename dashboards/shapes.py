"""Panels, variables and the frame that all dashboards share, as Grafana's classic dashboard JSON."""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "table", "state-timeline", "heatmap", "xychart"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAGS = ["kvguard", "vllm"]
COLOURS = ("green", "yellow", "red", "blue", "purple")

ENGINE = 'job=~"$job",model_name=~"$model_name",engine_id=~"$engine_id"'
PER_ENGINE = ENGINE + ',backend=~"$backend"'
PER_BACKEND = 'job=~"$job",model_name=~"$model_name",backend=~"$backend"'
RECORDED = 'model_name=~"$model_name",backend=~"$backend"'
SERVICE = 'job=~"$job"'


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL query of a panel and the template of its legend."""

    expr: str
    legend: str = ""
    instant: bool = False
    exemplar: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `values` names the numbers of a state timeline, `steps` colours a number from these bounds on."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    values: tuple[str, ...] = ()
    steps: tuple[tuple[float | None, str], ...] = ((None, "blue"),)
    log: bool = False
    stacked: bool = False

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel at a place of the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "datasource": DATASOURCE,
            "targets": [self._target(query, chr(65 + place)) for place, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
        } | ({"transformations": self._transformations()} if self.kind in ("table", "xychart") else {})

    def _target(self, query: Query, ref: str) -> dict[str, Any]:
        target: dict[str, Any] = {
            "refId": ref,
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
        }
        if query.instant or self.kind == "table":
            target |= {"instant": True, "range": False}
        if self.kind == "table":
            target["format"] = "table"
        if self.kind == "heatmap":
            target["format"] = "heatmap"
        if query.exemplar:
            target["exemplar"] = True
        return target

    def _defaults(self) -> dict[str, Any]:
        steps = [{"value": value, "color": colour} for value, colour in self.steps]
        defaults: dict[str, Any] = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.kind == "timeseries":
            custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 60 if self.stacked else 0, "showPoints": "never"}
            if self.stacked:
                custom["stacking"] = {"mode": "normal", "group": "A"}
            if self.log:
                custom["scaleDistribution"] = {"type": "log", "log": 10}
            defaults |= {"color": {"mode": "palette-classic"}, "custom": custom}
        elif self.kind == "state-timeline":
            named = {str(n): {"text": text, "color": COLOURS[n], "index": n} for n, text in enumerate(self.values)}
            defaults |= {
                "color": {"mode": "thresholds"},
                "custom": {"fillOpacity": 80, "lineWidth": 0},
                "mappings": [{"type": "value", "options": named}],
            }
        elif self.kind == "stat":
            defaults["color"] = {"mode": "thresholds"}
        return defaults

    def _options(self) -> dict[str, Any]:
        if self.kind == "timeseries":
            legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        if self.kind == "stat":
            reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "justifyMode": "auto",
                    "orientation": "auto", "textMode": "auto"}  # fmt: skip
        if self.kind == "state-timeline":
            legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
            return {"legend": legend, "mergeValues": True, "showValue": "auto", "rowHeight": 0.85,
                    "tooltip": {"mode": "single", "sort": "none"}}  # fmt: skip
        if self.kind == "heatmap":
            return {"calculate": False, "yAxis": {"unit": self.unit}, "cellGap": 1,
                    "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange",
                              "reverse": False},
                    "legend": {"show": True}, "tooltip": {"show": True}}  # fmt: skip
        if self.kind == "xychart":
            return {"seriesMapping": "auto", "dims": {"frame": 0}, "series": [],
                    "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
                    "tooltip": {"mode": "single", "sort": "none"}}  # fmt: skip
        return {"showHeader": True}

    def _transformations(self) -> list[dict[str, Any]]:
        if self.kind == "xychart":
            return [{"id": "joinByField", "options": {"byField": "Time", "mode": "inner"}}]
        hidden = dict.fromkeys(("Time", "__name__", "instance", "job"), True)
        return [{"id": "organize", "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard; rows are (title, panels), laid out from left to right."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    notes: tuple["Annotation", ...] = field(default=())

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels in order."""
        return tuple(panel for _, row in self.rows for panel in row)

    def json(self) -> dict[str, Any]:
        """The dashboard as Grafana reads it."""
        panels: list[dict[str, Any]] = []
        y = 0
        for title, row in self.rows:
            panels.append(
                {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                 "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
            )  # fmt: skip
            y, x, deepest = y + 1, 0, 0
            for panel in row:
                if x + panel.width > 24:
                    x, y, deepest = 0, y + deepest, 0
                panels.append(panel.json(len(panels) + 1, x, y))
                x, deepest = x + panel.width, max(deepest, panel.height)
            y += deepest
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": TAGS,
            "timezone": "browser",
            "editable": True,
            "graphTooltip": 1,
            "schemaVersion": 39,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [
                {"title": "kvguard", "type": "dashboards", "tags": ["kvguard"], "asDropdown": True, "includeVars": True,
                 "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": ""}
            ],
            "annotations": {"list": [note.json() for note in self.notes]},
            "templating": {"list": [variable() for variable in VARIABLES]},
            "panels": panels,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Annotation:
    """Marks the times at which `expr` has a value."""

    name: str
    expr: str
    title: str
    colour: str

    def json(self) -> dict[str, Any]:
        """The annotation as Grafana's Prometheus data source reads it."""
        return {
            "name": self.name, "datasource": DATASOURCE, "enable": True, "iconColor": self.colour, "expr": self.expr,
            "step": "30s", "titleFormat": self.title,
        }  # fmt: skip


EVENTS = (
    Annotation(
        "crossings", f'sum by (kind) (increase(kvguard_events_total{{{SERVICE},kind=~"departure|break-even"}}[1m])) > 0',
        "RTT crossed {{kind}}", "orange",
    ),
    Annotation(
        "switches", f'sum by (kind) (increase(kvguard_events_total{{{SERVICE},kind=~"switch|controller"}}[1m])) > 0',
        "{{kind}}", "blue",
    ),
)  # fmt: skip


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0,
            "refresh": 1, "regex": "", "multi": False, "includeAll": False}  # fmt: skip


def _labels(name: str, label: str, metric: str) -> Any:
    def make() -> dict[str, Any]:
        return {
            "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "hide": 0, "refresh": 2, "sort": 1,
            "regex": "", "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "query": {"query": f"label_values({metric}, {name})", "refId": f"kvguard-{name}"},
        }  # fmt: skip

    return make


VARIABLES = (
    _datasource,
    _labels("job", "Job", "kvguard_build_info"),
    _labels("model_name", "Model", f"kvguard_engine_info{{{SERVICE}}}"),
    _labels("engine_id", "Engine", f'kvguard_engine_info{{{SERVICE},model_name=~"$model_name"}}'),
    _labels("backend", "Backend", f'kvguard_offload_mode{{{SERVICE},model_name=~"$model_name"}}'),
)
