"""What is shown of the controllers: a row of `GET /v1/offload`, the gauges of a scrape."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from guard import semconv
from guard.control.shapes import ALL
from guard.semconv import Metric
from guard.service.controlling import Controlling
from guard.service.evidence import Gathered
from guard.slo.objective import ANY

_LIMITS = ("max_inflight", "max_inflight_bytes", "min_tokens", "share", "holdout", "trickle_seconds")


def control_of(controlling: Controlling, engine_id: str, backend: str, model: str) -> dict[str, Any]:
    """The controller of an engine and backend as members of its row; all None while it has not decided yet."""
    key = (engine_id, backend)
    unit = controlling.units.get(key)
    if unit is None or unit.plan is None:
        return dict.fromkeys(("projected", "limit", "verdict", "control"))
    plan, held = unit.plan, controlling.gathered.of(key)
    count, size, oldest = controlling.flight(key)
    objective = controlling.objectives.find(model)
    stood = controlling.standing(key, objective) if objective else None
    projection = plan.projection
    return {
        "projected": {
            "remote": projection.remote, "recompute": projection.recompute, "remote_tail": projection.remote_tail,
            "recompute_tail": projection.recompute_tail, "attainable": unit.attainable,
            "n": controlling.behind(model, backend),
        },
        "limit": {name: getattr(plan.reads, name) for name in _LIMITS},
        "verdict": {name: getattr(unit.verdict, name) for name in ("state", "cause", "shape", "reason")},
        "control": {
            "reason": plan.reason,
            "inflight": count,
            "inflight_bytes": size,
            "oldest_age_seconds": oldest,
            "pace": unit.state.pace,
            "rtt_seconds": unit.link[0],
            "reachable": unit.link[1],
            "objective": None if objective is None or stood is None else {
                "ttft_seconds": objective.ttft_seconds, "percentile": objective.percentile, "met": stood.met,
                "missed": stood.missed, "attained": stood.attained, "burn_rate": stood.burn_rate,
                "goodput_per_second": stood.goodput, "seconds": stood.seconds,
            },
            "would": {"requests": held.would, "gained_seconds": held.would_gain},
        },
    }  # fmt: skip


def gauges(controlling: Controlling) -> Iterator[tuple[Metric, Sequence[str], float]]:
    """What is shown of the controllers, for a scrape on another thread."""
    for (engine_id, backend), unit in list(controlling.units.items()):
        held = controlling.gathered.found.get((engine_id, backend)) or Gathered()
        labels = (unit.model, engine_id, backend)
        count, _, oldest = controlling.flight((engine_id, backend))
        yield semconv.KV_FETCH_INFLIGHT, labels, float(count)
        yield semconv.KV_FETCH_OLDEST_AGE, labels, oldest
        plan = unit.plan
        if plan is None:
            continue
        yield semconv.CONTROLLER_STATE, (*labels, plan.state), 1.0
        yield semconv.SLA_ATTAINABLE, labels, float(unit.attainable)
        reads = plan.reads
        for name in ("max_inflight", "max_inflight_bytes", "min_tokens", "share"):
            value = getattr(reads, name)
            if value is not None and (name != "share" or value < 1.0) and (name != "min_tokens" or value):
                yield semconv.READS_LIMIT, (*labels, name), float(value)
        for choice, projected in (
            ("remote", plan.projection.remote_tail), ("recompute", plan.projection.recompute_tail),
        ):  # fmt: skip
            if projected is not None:
                yield semconv.TTFT_PROJECTED, (*labels, ALL, choice), projected
        for choice, errors in held.errors.items():
            if errors:
                yield semconv.PROJECTION_ERROR, (*labels, choice), statistics.median(list(errors))
    yield from _objectives(controlling)


def _objectives(controlling: Controlling) -> Iterator[tuple[Metric, Sequence[str], float]]:
    """The bounds as they are set, and the budgets under the models' own names, so that rules can join them."""
    for item in controlling.objectives.items:
        yield semconv.SLA_TTFT, (item.model, item.class_, f"{item.percentile:g}"), item.ttft_seconds
    for model in {unit.model for unit in list(controlling.units.values())}:
        general, classes = controlling.objectives.for_model(model)
        for class_, objective in ((ANY, general), *classes.items()):
            if objective:
                yield semconv.SLA_BUDGET, (model, class_), objective.budget
