"""The queries of a dashboard as Grafana would send them, with its variables filled in."""

import re
from collections.abc import Mapping
from typing import Any

from alerts.servers import Prometheus

ALL = {"job": ".*", "model_name": ".*", "engine_id": ".*", "backend": ".*"}
RATE_INTERVAL = "1m"  # four scrapes of 15 s, which is what Grafana makes of it at short ranges


def filled(expr: str, variables: Mapping[str, str] = ALL) -> str:
    """The expression without variables."""
    expr = expr.replace("$__rate_interval", RATE_INTERVAL).replace("$__interval", RATE_INTERVAL)
    return re.sub(r"\$([a-z_]+)", lambda match: variables[match.group(1)], expr)


def variable_values(server: Prometheus, query: str, end: float) -> list[str]:
    """What `label_values(selector, label)` offers."""
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    if match is None:
        raise ValueError(f"not a variable query: {query}")
    values: list[str] = server.get(
        f"label/{match[2]}/values", **{"match[]": filled(match[1]), "start": end - 3600, "end": end}
    )
    return values


def ranged(server: Prometheus, expr: str, start: float, end: float, step: float = 15.0) -> list[dict[str, Any]]:
    """The series of an expression over a time."""
    found: list[dict[str, Any]] = server.get("query_range", query=filled(expr), start=start, end=end, step=step)[
        "result"
    ]
    return found


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A legend as Grafana fills it."""
    if not template:
        return ", ".join(f"{name}={value}" for name, value in labels.items())
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template).strip()
