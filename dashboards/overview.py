"""Is it helping, by how much, what is the guard doing."""

from dashboards.shapes import ENGINE, EVENTS, PER_BACKEND, PER_ENGINE, RECORDED, SERVICE, Dashboard, Panel, Query

_RATE = "[$__rate_interval]"
_MODEL = 'model_name=~"$model_name"'
_REQUESTS = f"sum(rate(kvguard_ttft_seconds_count{{{PER_ENGINE}}}{_RATE}))"


def _mean(metric: str, selector: str = PER_ENGINE) -> str:
    return f"sum(rate({metric}_sum{{{selector}}}{_RATE})) / {_REQUESTS}"


_HELPING = (
    Panel(
        title="TTFT p95", kind="stat", unit="s", width=4, height=5, steps=((None, "green"), (1, "yellow"), (2, "red")),
        description="kvguard_ttft_seconds: 95th percentile, all requests. Measured at the scheduler.",
        queries=(Query(
            f"histogram_quantile(0.95, sum by (le) (rate(kvguard_ttft_seconds_bucket{{{PER_ENGINE}}}{_RATE})))"
        ),),
    ),
    Panel(
        title="Saved per hit (projected)", kind="stat", unit="s", width=4, height=5,
        steps=((None, "red"), (0, "green")),
        description="kvguard_ttft_projected_seconds: recompute minus remote, mean over classes and engines. Projected, not"
        " measured. Below 0 remote reads cost.",
        queries=(Query(
            f'avg(kvguard_ttft_projected_seconds{{{PER_ENGINE},choice="recompute"}})'
            f' - avg(kvguard_ttft_projected_seconds{{{PER_ENGINE},choice="remote"}})'
        ),),
    ),
    Panel(
        title="Requests that read remotely", kind="stat", unit="percentunit", width=4, height=5,
        description="kvguard_decisions_total: share with decision remote.",
        queries=(Query(
            f'sum(rate(kvguard_decisions_total{{{PER_ENGINE},decision="remote"}}{_RATE}))'
            f" / sum(rate(kvguard_decisions_total{{{PER_ENGINE}}}{_RATE}))"
        ),),
    ),
    Panel(
        title="Missed objective", kind="stat", unit="percentunit", width=4, height=5,
        steps=((None, "green"), (0.05, "yellow"), (0.2, "red")),
        description="model_name:kvguard_sla_missed:ratio_rate5m, the worst model: share of requests above their TTFT bound.",
        queries=(Query(f"max(model_name:kvguard_sla_missed:ratio_rate5m{{{_MODEL}}})"),),
    ),
    Panel(
        title="Classes that lose", kind="stat", width=4, height=5, steps=((None, "green"), (1, "red")),
        description="kvguard_verdict: pairs of backend and class whose state is harmful.",
        queries=(Query(
            f'count(kvguard_verdict{{{PER_BACKEND},dimension="state",value="harmful"}} == 1) or vector(0)'
        ),),
    ),
    Panel(
        title="Engines, and silent ones", kind="stat", width=4, height=5,
        description="kvguard_engine_info: engines known; kvguard_directive_age_seconds: those that have not polled for 60 s.",
        queries=(
            Query(f"count(kvguard_engine_info{{{ENGINE}}})", "engines"),
            Query(f'count(kvguard_directive_age_seconds{{{SERVICE},engine_id=~"$engine_id"}} > 60) or vector(0)', "silent"),
        ),
    ),
)  # fmt: skip

_TTFT = (
    Panel(
        title="TTFT by road taken, p50", unit="s", width=12,
        description="kvguard_ttft_seconds by decision. Requests of different roads are different requests: the difference"
        " is not what reading saves. Dots lead to traces.",
        queries=(Query(
            "histogram_quantile(0.5, sum by (decision, le)"
            f" (rate(kvguard_ttft_seconds_bucket{{{PER_ENGINE}}}{_RATE})))", "{{decision}}", exemplar=True,
        ),),
    ),
    Panel(
        title="TTFT p95 against its bound", unit="s", width=12,
        description="model_name_backend:kvguard_ttft_seconds:p95_rate5m, and kvguard_sla_ttft_seconds: the objective's bound.",
        queries=(
            Query(f"model_name_backend:kvguard_ttft_seconds:p95_rate5m{{{RECORDED}}}", "{{model_name}} {{backend}}"),
            Query(f"kvguard_sla_ttft_seconds{{{SERVICE}}}", "bound at {{percentile}}: model {{model_name}}, class {{class}}"),
        ),
    ),
    Panel(
        title="Where TTFT goes: remote part, mean per request", unit="s", width=12,
        description="kvguard_ttft_seconds, kvguard_kv_exposed_wait_seconds (what the remote tier adds to TTFT),"
        " kvguard_kv_lookup_duration_seconds, kvguard_ttft_residual_seconds (what the measured parts leave unexplained).",
        queries=(
            Query(_mean("kvguard_ttft_seconds"), "TTFT"),
            Query(_mean("kvguard_kv_exposed_wait_seconds"), "exposed wait"),
            Query(_mean("kvguard_kv_lookup_duration_seconds"), "lookup"),
            Query(_mean("kvguard_ttft_residual_seconds", ENGINE), "unexplained"),
        ),
    ),
    Panel(
        title="What the guard does: requests by decision", unit="reqps", width=12, stacked=True,
        description="kvguard_decisions_total: remote reads, decline pays the lookup and recomputes, skip pays nothing,"
        " none found nothing.",
        queries=(Query(f"sum by (decision) (rate(kvguard_decisions_total{{{PER_ENGINE}}}{_RATE}))", "{{decision}}"),),
    ),
    Panel(
        title="Error budget burn", unit="none", width=12,
        description="Recording rules model_name:kvguard_sla_missed:ratio_rate5m, 1h and 6h divided by"
        " kvguard_sla_budget_ratio. 1 uses the budget up exactly; 14.4 over 1h pages.",
        queries=tuple(
            Query(
                f"model_name:kvguard_sla_missed:ratio_rate{window}{{{_MODEL}}}"
                " / on (model_name) model_name:kvguard_sla_budget_ratio:min", f"{{{{model_name}}}} {window}",
            )
            for window in ("5m", "1h", "6h")
        ),
    ),
    Panel(
        title="vLLM's queue time, with and without remote loads", unit="s", width=12,
        description="vllm:request_queue_time_seconds through kvguard_engine_info, mean per request. vLLM counts lookup and"
        " fetch of an asynchronous connector as time in queue; the second line takes kvguard_kv_miss_latency_seconds out.",
        queries=(
            Query('engine_id:vllm_request_queue_time_seconds:mean_rate5m{engine_id=~"$engine_id"}', "{{engine_id}} as vLLM says"),
            Query('engine_id:vllm_queue_without_remote_seconds:mean_rate5m{engine_id=~"$engine_id"}', "{{engine_id}} without remote"),
        ),
    ),
    Panel(
        title="Remote hits that vLLM counts", unit="percentunit", width=12,
        description="vllm:external_prefix_cache_hits over queries (tokens), through kvguard_engine_info.",
        queries=(Query('engine_id:vllm_external_prefix_cache_hits:ratio_rate5m{engine_id=~"$engine_id"}', "{{engine_id}}"),),
    ),
    Panel(
        title="Requests that wait in vLLM", width=12,
        description="vllm:num_requests_waiting, joined to engine_id by kvguard_engine_info. Requests that wait for remote KV"
        " are among them.",
        queries=(Query(
            "sum by (engine_id) (vllm:num_requests_waiting * on (instance, engine) group_left (engine_id)"
            " max by (instance, engine, engine_id) (label_replace("
            f'kvguard_engine_info{{{ENGINE}}}, "instance", "$1", "vllm_instance", "(.+)")))', "{{engine_id}}",
        ),),
    ),
)  # fmt: skip

_SELF = (
    Panel(
        title="Service", kind="table", width=8, height=7,
        description="kvguard_build_info: version and instance.",
        queries=(Query(f"kvguard_build_info{{{SERVICE}}}"),),
    ),
    Panel(
        title="Control loop", unit="s", width=8, height=7,
        description="kvguard_control_loop_last_run_timestamp_seconds: age of the last tick, stalled beyond 30 s;"
        " kvguard_control_loop_lag_seconds: longest delay of a tick.",
        queries=(
            Query(f"time() - kvguard_control_loop_last_run_timestamp_seconds{{{SERVICE}}}", "last tick {{instance}}"),
            Query(f"kvguard_control_loop_lag_seconds{{{SERVICE}}}", "lag {{instance}}"),
        ),
    ),
    Panel(
        title="Requests in the join", width=8, height=7,
        description="kvguard_join_pending_requests: requests that wait for more of their spans.",
        queries=(Query(f"kvguard_join_pending_requests{{{SERVICE}}}", "{{instance}}"),),
    ),
    Panel(
        title="Spans received and forwarded", unit="ops", width=8, height=7,
        description="kvguard_ingest_spans_total by outcome; kvguard_forward_spans_total to your own OTLP endpoint;"
        " kvguard_history_rows_total: requests written to the history.",
        queries=(
            Query(f"sum by (outcome) (rate(kvguard_history_rows_total{{{SERVICE}}}{_RATE}))", "history {{outcome}}"),
            Query(f"sum by (outcome) (rate(kvguard_ingest_spans_total{{{SERVICE}}}{_RATE}))", "{{outcome}}"),
            Query(f"sum by (outcome) (rate(kvguard_forward_spans_total{{{SERVICE}}}{_RATE}))", "forward {{outcome}}"),
        ),
    ),
    Panel(
        title="OTLP requests by status", unit="reqps", width=8, height=7,
        description="kvguard_ingest_requests_total: 503 is back-pressure, 4xx a sender that we do not accept.",
        queries=(Query(f"sum by (status) (rate(kvguard_ingest_requests_total{{{SERVICE}}}{_RATE}))", "{{status}}"),),
    ),
    Panel(
        title="Spans lost or without their request", unit="ops", width=8, height=7,
        description="kvguard_ingest_lost_spans_total by cause; kvguard_ingest_orphans_total by kind;"
        " kvguard_estimate_lost_requests_total: requests that the estimates had no room for.",
        queries=(
            Query(f"sum by (cause) (rate(kvguard_ingest_lost_spans_total{{{SERVICE}}}{_RATE}))", "lost: {{cause}}"),
            Query(f"sum by (kind) (rate(kvguard_ingest_orphans_total{{{SERVICE}}}{_RATE}))", "orphan: {{kind}}"),
            Query(f"sum (rate(kvguard_estimate_lost_requests_total{{{SERVICE}}}{_RATE}))", "lost to estimates"),
        ),
    ),
)  # fmt: skip

DASHBOARD = Dashboard(
    uid="kvguard-overview", title="kvguard / Overview",
    description="Is remote KV offload helping, by how much, and what does the guard do.",
    rows=(("Is it helping?", _HELPING), ("Time to first token", _TTFT), ("kvguard itself", _SELF)), notes=EVENTS,
)  # fmt: skip
