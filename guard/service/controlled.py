"""What `GET /v1/offload` shows of a controller."""

from typing import Any

from guard.service.controlling import Controlling


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


_LIMITS = ("max_inflight", "max_inflight_bytes", "min_tokens", "share", "holdout", "trickle_seconds")
