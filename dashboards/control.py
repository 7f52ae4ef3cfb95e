"""What the guard does, on what grounds, and whether its projections hold."""

from dashboards.shapes import ENGINE, EVENTS, PER_ENGINE, SERVICE, Dashboard, Panel, Query

_RATE = "[$__rate_interval]"
_BY = "engine_id, backend"
_STATES = ("open", "limited", "bypass", "half-open")
_MODES = ("auto", "on", "off", "observe")


def _places(metric: str, label: str, values: tuple[str, ...]) -> str:
    return " or ".join(
        f'max by ({_BY}) ({metric}{{{PER_ENGINE},{label}="{value}"}} == 1) * {number}'
        for number, value in enumerate(values)
    )


_STATE = (
    Panel(
        title="State of the controller",
        kind="state-timeline",
        width=24,
        height=8,
        values=_STATES,
        description="kvguard_controller_state per engine and backend.",
        queries=(Query(_places("kvguard_controller_state", "state", _STATES), "{{engine_id}} {{backend}}"),),
    ),
    Panel(
        title="Mode asked for",
        kind="state-timeline",
        width=24,
        height=7,
        values=_MODES,
        description="kvguard_offload_mode per engine and backend: what operators switched.",
        queries=(Query(_places("kvguard_offload_mode", "mode", _MODES), "{{engine_id}} {{backend}}"),),
    ),
)

_DECISIONS = (
    Panel(
        title="Decisions and why", unit="reqps", width=12, stacked=True,
        description="kvguard_decisions_total by decision and reason.",
        queries=(Query(
            f"sum by (decision, reason) (rate(kvguard_decisions_total{{{PER_ENGINE}}}{_RATE}))", "{{decision}}: {{reason}}"
        ),),
    ),
    Panel(
        title="Limits in force", width=12,
        description="kvguard_reads_limit, the tightest of the engines shown. No line: no limit. Bytes are divided by 2^20.",
        queries=(
            Query(f'min by (backend, limit) (kvguard_reads_limit{{{PER_ENGINE},limit!="max_inflight_bytes"}})', "{{backend}} {{limit}}"),
            Query(f'min by (backend) (kvguard_reads_limit{{{PER_ENGINE},limit="max_inflight_bytes"}}) / 2^20', "{{backend}} MiB in flight"),
        ),
    ),
    Panel(
        title="Reads in flight", width=12,
        description="kvguard_kv_fetch_inflight, sum per backend.",
        queries=(Query(f"sum by (backend) (kvguard_kv_fetch_inflight{{{PER_ENGINE}}})", "{{backend}}"),),
    ),
    Panel(
        title="Crossings, switches, changes of state", width=12,
        description="kvguard_events_total in 5 minutes, by kind.",
        queries=(Query(f"sum by (kind) (increase(kvguard_events_total{{{SERVICE}}}[5m])) > 0", "{{kind}}"),),
    ),
)  # fmt: skip

_PROJECTION = (
    Panel(
        title="TTFT: projected both ways, and what happened", unit="s", width=12,
        description="kvguard_ttft_projected_seconds, mean over classes, by choice; kvguard_ttft_seconds p95, measured.",
        queries=(
            Query(f"avg by (choice) (kvguard_ttft_projected_seconds{{{PER_ENGINE}}})", "projected {{choice}}"),
            Query(
                f"histogram_quantile(0.95, sum by (le) (rate(kvguard_ttft_seconds_bucket{{{PER_ENGINE}}}{_RATE})))",
                "measured p95", exemplar=True,
            ),
        ),
    ),
    Panel(
        title="Projection error", unit="percentunit", width=12,
        description="kvguard_projection_error_ratio: median of |actual - projected| / actual, worst engine, by choice. Above"
        " 30 % alerts.",
        queries=(Query(f"max by (backend, choice) (kvguard_projection_error_ratio{{{PER_ENGINE}}})", "{{backend}} {{choice}}"),),
    ),
    Panel(
        title="Objective within reach", kind="stat", width=6, height=7, steps=((None, "red"), (1, "green")),
        description="kvguard_sla_attainable: 0 where neither choice is projected to meet the objective; the worst engine.",
        queries=(Query(f"min(kvguard_sla_attainable{{{PER_ENGINE}}})"),),
    ),
    Panel(
        title="Requests within and beyond the bound", unit="reqps", width=10, height=7, stacked=True,
        description="kvguard_sla_requests_total by outcome: met is goodput.",
        queries=(Query(f"sum by (outcome) (rate(kvguard_sla_requests_total{{{ENGINE}}}{_RATE}))", "{{outcome}}"),),
    ),
    Panel(
        title="Objectives", kind="table", width=8, height=7,
        description="kvguard_sla_ttft_seconds (bound) and kvguard_sla_budget_ratio (share that may miss it).",
        queries=(
            Query(f'max by (model_name, class, percentile) (kvguard_sla_ttft_seconds{{{SERVICE}}})'),
            Query(f'max by (model_name, class) (kvguard_sla_budget_ratio{{{SERVICE}}})'),
        ),
    ),
)  # fmt: skip

_HOOKS = (
    Panel(
        title="Age of the last poll", unit="s", width=12,
        description="kvguard_directive_age_seconds: hooks poll every 5 s; beyond 15 s the lease has run out.",
        queries=(Query(f'max by (engine_id) (kvguard_directive_age_seconds{{{SERVICE},engine_id=~"$engine_id"}})', "{{engine_id}}"),),
    ),
    Panel(
        title="Engines", kind="table", width=12,
        description="kvguard_engine_info: engine_id and the labels of vLLM's own series.",
        queries=(Query(f"max by (engine_id, vllm_instance, engine, model_name) (kvguard_engine_info{{{ENGINE}}})"),),
    ),
)  # fmt: skip

DASHBOARD = Dashboard(
    uid="kvguard-control", title="kvguard / Control",
    description="State, decisions and limits of the guard; projected against actual.",
    rows=(
        ("State", _STATE), ("Decisions and limits", _DECISIONS), ("Projections and objective", _PROJECTION),
        ("Hooks", _HOOKS),
    ),
    notes=EVENTS,
)  # fmt: skip
