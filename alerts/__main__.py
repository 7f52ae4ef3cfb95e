"""Writes the rule files, the PrometheusRule and docs/alerts.md: `python -m alerts` (or `--check`)."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from alerts import alerting, recording, thresholds

ROOT = Path(__file__).parent.parent
NOTE = "# Written by `make generate` from alerts/*.py; change those. Numbers: alerts/thresholds.py.\n"


def rules() -> dict[str, Any]:
    """The recording rules."""
    return {"groups": [_group(name, [one.rule() for one in group]) for name, group in recording.GROUPS]}


def alerts(runbooks: str = thresholds.RUNBOOKS, grafana: str = thresholds.GRAFANA) -> dict[str, Any]:
    """The alerts."""
    return {"groups": [_group(name, [one.rule(runbooks, grafana) for one in group]) for name, group in alerting.GROUPS]}


def files(runbooks: str = thresholds.RUNBOOKS, grafana: str = thresholds.GRAFANA) -> dict[str, str]:
    """Path in the tree -> content."""
    recorded, alerted = rules(), alerts(runbooks, grafana)
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvguard", "labels": {"app.kubernetes.io/name": "kvguard"}},
        "spec": {"groups": [*recorded["groups"], *alerted["groups"]]},
    }
    return {
        "alerts/kvguard.rules.yml": NOTE + dump(recorded),
        "alerts/kvguard.alerts.yml": NOTE + dump(alerted),
        "deploy/kubernetes/prometheusrule.yml": NOTE + dump(resource),
        "docs/alerts.md": page(),
    }


def page() -> str:
    """docs/alerts.md."""
    rows = [
        f"| [{alert.name}](runbooks/{alert.page}.md) | {alert.severity} | {alert.wait} | {alert.summary} |"
        for alert in alerting.ALERTS
    ]
    records = [
        f"| `{one.record}` | `{one.expr.replace('|', chr(92) + '|')}` |"
        for _, group in recording.GROUPS
        for one in group
    ]
    return "\n".join(
        [
            "# Alerts", "", "Written by `make generate`; do not edit. Thresholds: `alerts/thresholds.py`. Each alert has"
            " a runbook, and tests where it fires and where it does not (`tests/alerts`).", "",
            "| alert | severity | for | what it says |", "|---|---|---|---|", *rows, "",
            "`critical` pages, `warning` is for the working day, `info` is context for the others. While a `critical`"
            " fires, Alertmanager holds back what only repeats it (`alerts/alertmanager.yml`).", "",
            "## Recording rules", "", "| rule | expression |", "|---|---|", *records, "",
        ]
    )  # fmt: skip


def dump(data: Mapping[str, Any]) -> str:
    """YAML as a person would write it."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Block style, lists indented under their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        """Never without indent."""
        super().increase_indent(flow, False)


def _group(name: str, of: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "rules": of}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m alerts", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is stale")
    parser.add_argument("--runbooks", default=thresholds.RUNBOOKS, help="URL of the folder with the runbooks")
    parser.add_argument("--grafana", default=thresholds.GRAFANA, help="URL of Grafana")
    args = parser.parse_args()
    stale = []
    for name, content in files(args.runbooks, args.grafana).items():
        path = ROOT / name
        if path.exists() and path.read_text() == content:
            continue
        stale.append(name)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    if args.check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run `make generate`")


if __name__ == "__main__":
    main()
