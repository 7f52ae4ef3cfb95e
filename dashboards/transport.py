"""RTT, lookups, fetches, bytes, stalls."""

from dashboards.shapes import EVENTS, PER_ENGINE, RECORDED, SERVICE, Dashboard, Panel, Query

_RATE = "[$__rate_interval]"


def _quantile(metric: str, share: float, by: str, selector: str = PER_ENGINE) -> str:
    by = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{{{selector}}}{_RATE})))"


_NETWORK = (
    Panel(
        title="Idle RTT", unit="s", width=12, log=True,
        description="kvguard_rtt_idle_seconds: least of the last probes. Our own bytes raise RTT; this is RTT without them.",
        queries=(Query(f"kvguard_rtt_idle_seconds{{{SERVICE}}}", "{{prober}} {{target}}"),),
    ),
    Panel(
        title="RTT, p50 and p99", unit="s", width=12, log=True,
        description="kvguard_rtt_seconds: all probes, with what our own load adds.",
        queries=tuple(
            Query(_quantile("kvguard_rtt_seconds", share, "target", SERVICE), f"{{{{target}}}} {name}")
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
    ),
    Panel(
        title="Probes that fail", unit="percentunit", width=12, height=7,
        description="kvguard_probes_total: share with outcome failed.",
        queries=(Query(
            f'sum by (prober, target) (rate(kvguard_probes_total{{{SERVICE},outcome="failed"}}{_RATE}))'
            f" / sum by (prober, target) (rate(kvguard_probes_total{{{SERVICE}}}{_RATE}))", "{{prober}} {{target}}",
        ),),
    ),
    Panel(
        title="Bytes fetched", unit="Bps", width=12, height=7,
        description="kvguard_kv_fetch_bytes_total: what fetches moved, by backend.",
        queries=(Query(f"sum by (backend) (rate(kvguard_kv_fetch_bytes_total{{{PER_ENGINE}}}{_RATE}))", "{{backend}}"),),
    ),
)  # fmt: skip

_READS = (
    Panel(
        title="Fetch time", unit="s", width=12, log=True,
        description="kvguard_kv_fetch_duration_seconds: one attempt, blocks allocated to KV usable. Dots lead to traces.",
        queries=tuple(
            Query(_quantile("kvguard_kv_fetch_duration_seconds", share, "backend"), f"{{{{backend}}}} {name}", exemplar=True)
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
    ),
    Panel(
        title="Fetch times", kind="heatmap", unit="s", width=12,
        description="kvguard_kv_fetch_duration_seconds: how many fetches took how long.",
        queries=(Query(
            f"sum by (le) (increase(kvguard_kv_fetch_duration_seconds_bucket{{{PER_ENGINE}}}{_RATE}))", "{{le}}"
        ),),
    ),
    Panel(
        title="Lookup time", unit="s", width=12, log=True,
        description="kvguard_kv_lookup_duration_seconds. LMCacheMP reads the store during its lookup: slow reads show here.",
        queries=tuple(
            Query(_quantile("kvguard_kv_lookup_duration_seconds", share, "backend"), f"{{{{backend}}}} {name}")
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
    ),
    Panel(
        title="Miss latency and exposed wait, p95", unit="s", width=12,
        description="kvguard_kv_miss_latency_seconds (local miss to KV usable) and kvguard_kv_exposed_wait_seconds (the part"
        " that is not hidden behind other work).",
        queries=(
            Query(f"model_name_backend:kvguard_kv_miss_latency_seconds:p95_rate5m{{{RECORDED}}}", "miss latency {{backend}}"),
            Query(_quantile("kvguard_kv_exposed_wait_seconds", 0.95, "backend"), "exposed {{backend}}"),
        ),
    ),
    Panel(
        title="Fetches by outcome", unit="ops", width=12, height=7, stacked=True,
        description="kvguard_kv_fetch_duration_seconds by outcome: ok, partial, failed.",
        queries=(Query(
            f"sum by (outcome) (rate(kvguard_kv_fetch_duration_seconds_count{{{PER_ENGINE}}}{_RATE}))", "{{outcome}}"
        ),),
    ),
    Panel(
        title="Reads in flight", width=12, height=7,
        description="kvguard_kv_fetch_inflight per engine.",
        queries=(Query(f"kvguard_kv_fetch_inflight{{{PER_ENGINE}}}", "{{engine_id}} {{backend}}"),),
    ),
)  # fmt: skip

_STALLS = (
    Panel(
        title="Oldest read in flight", unit="s", width=12, height=7,
        description="kvguard_kv_fetch_oldest_age_seconds: beyond 10 s a read is stalled.",
        queries=(Query(f"max by (engine_id, backend) (kvguard_kv_fetch_oldest_age_seconds{{{PER_ENGINE}}})", "{{engine_id}} {{backend}}"),),
    ),
    Panel(
        title="Losses in the hook", unit="ops", width=12, height=7,
        description="kvguard_hook_records_dropped_total and kvguard_hook_errors_total per engine.",
        queries=(
            Query(f'sum by (engine_id) (rate(kvguard_hook_records_dropped_total{{{SERVICE},engine_id=~"$engine_id"}}{_RATE}))', "dropped {{engine_id}}"),
            Query(f'sum by (engine_id) (rate(kvguard_hook_errors_total{{{SERVICE},engine_id=~"$engine_id"}}{_RATE}))', "errors {{engine_id}}"),
        ),
    ),
)  # fmt: skip

DASHBOARD = Dashboard(
    uid="kvguard-transport", title="kvguard / Transport", description="RTT, fetches, reads, bytes, stalls.",
    rows=(("Network", _NETWORK), ("Reads", _READS), ("Stalls and losses", _STALLS)), notes=EVENTS,
)  # fmt: skip
