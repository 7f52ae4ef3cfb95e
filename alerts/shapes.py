"""Alerts and recording rules as values."""

from dataclasses import dataclass
from typing import Any, Literal

from alerts import thresholds

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recording rule, named level:metric:operation."""

    record: str
    expr: str

    def rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. `summary` is static, `description` a template; `runbook` is the page where several share one."""

    name: str
    severity: Severity
    expr: str
    wait: str
    summary: str
    description: str
    dashboard: str
    runbook: str = ""

    @property
    def page(self) -> str:
        """Name of the runbook page, without ending."""
        return self.runbook or self.name

    def rule(self, runbooks: str = thresholds.RUNBOOKS, grafana: str = thresholds.GRAFANA) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks}/{self.page}.md",
                "dashboard_url": f"{grafana}/d/{self.dashboard}",
            },
        }
