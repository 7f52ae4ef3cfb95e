"""The alerts. Each has a page in docs/runbooks, and tests in tests/alerts where it fires and where it does not."""

from typing import Final

from alerts import thresholds as t
from alerts.recording import ENGINE, burn_ratio
from alerts.shapes import Alert

OVERVIEW: Final = "kvguard-overview"
INFLECTION: Final = "kvguard-inflection"
CONTROL: Final = "kvguard-control"
TRANSPORT: Final = "kvguard-transport"

_WHERE: Final = "{{ $labels.model_name }}, engine {{ $labels.engine_id }}, backend {{ $labels.backend }}"
_CLASS: Final = "{{ $labels.model_name }}, backend {{ $labels.backend }}, class {{ $labels.class }}"


def _point(kind: str) -> str:
    """Template: the RTT of `kind` for the alert's backend and class with its source, or that it is not known."""
    selector = (
        "kvguard_inflection_rtt_seconds{"
        f"kind='{kind}',bound='value',model_name=%q,backend=%q,class=%q"
        "}"
    )  # fmt: skip
    labels = "$labels.model_name $labels.backend $labels.class"
    return (
        f'{{{{ with printf "{selector}" {labels} | query }}}}{{{{ . | first | value | humanizeDuration }}}}'
        f' ({{{{ . | first | label "source" }}}}){{{{ else }}}}not known{{{{ end }}}}'
    )


def _remote_share(by: str) -> str:
    """Share of the requests that read remotely."""
    remote = f'sum by ({by}) (rate(kvguard_ttft_seconds_count{{decision="remote"}}[5m]))'
    return f"{remote} / sum by ({by}) (rate(kvguard_ttft_seconds_count[5m]))"


_CROSSINGS: Final = (
    Alert(
        name="KVGuardDepartureCrossed", severity="warning", wait="2m", dashboard=INFLECTION,
        expr='max by (model_name, backend, class) (kvguard_verdict{dimension="state",value="departed"}) == 1',
        summary="TTFT of remote hits has departed from its baseline.",
        description=f"{_CLASS}: RTT {_point('now')}, departure at {_point('departure')}, break-even at"
        f" {_point('break-even')}. Remote reads still pay, but less.",
    ),
    Alert(
        name="KVGuardBreakEvenCrossed", severity="warning", wait="2m", dashboard=INFLECTION,
        expr='max by (model_name, backend, class) (kvguard_verdict{dimension="state",value="harmful"}) == 1',
        summary="Remote reads cost more than recomputing.",
        description=f"{_CLASS}: RTT {_point('now')}, break-even at {_point('break-even')}.",
    ),
    Alert(
        name="KVGuardOffloadHarmful",
        severity="critical",
        wait="5m",
        dashboard=CONTROL,
        expr=f"({_remote_share('model_name, backend, class')}"
        f' or label_replace({_remote_share("model_name, backend")}, "class", "all", "", ""))'
        f" > {t.READS_SHARE}"
        " and on (model_name, backend, class)"
        ' max by (model_name, backend, class) (kvguard_verdict{dimension="state",value="harmful"}) == 1',
        summary="Requests go on reading from a remote tier that makes them slower.",
        description=f"{_CLASS}: {{{{ $value | humanizePercentage }}}} of requests still read remotely although that is a"
        " loss. Is the mode on or observe, or does the guard not act?",
    ),
)  # fmt: skip


def _burn(name: str, factor: float, long: str, short: str, wait: str, severity: str) -> Alert:
    def above(window: str) -> str:
        limit = f"clamp_max({factor} * model_name:kvguard_sla_budget_ratio:min, {t.WORST_SHARE})"
        return f"{burn_ratio(window)} > on (model_name) {limit}"

    enough = (
        f'sum by (model_name) (increase(kvguard_sla_requests_total{{outcome="missed"}}[{long}])) >= {t.MISSES_AT_LEAST}'
    )
    return Alert(
        name=f"KVGuardTTFTBudgetBurn{name}", runbook="KVGuardTTFTBudgetBurn", wait=wait, dashboard=OVERVIEW,
        severity="critical" if severity == "critical" else "warning",
        expr=f"({above(long)}) and on (model_name) ({above(short)}) and on (model_name) ({enough})",
        summary="Too many requests miss the TTFT objective.",
        description=f"{{{{ $labels.model_name }}}}: {{{{ $value | humanizePercentage }}}} of requests missed their bound in"
        f" the last {long}, and as many of the last {short}: {factor} times what the objective allows, or more than 90 %.",
    )  # fmt: skip


_BURN: Final = tuple(_burn(*row) for row in t.BURN)

_GUARD: Final = (
    Alert(
        name="KVGuardThrottling", severity="info", wait="2m", dashboard=CONTROL,
        expr='max by (model_name, engine_id, backend, state) (kvguard_controller_state{state=~"limited|bypass|half-open"})'
        " == 1",
        summary="The guard limits remote reads.",
        description=f"{_WHERE}: the controller is in state {{{{ $labels.state }}}}.",
    ),
    Alert(
        name="KVGuardBypassedTooLong", severity="warning", wait="1h", dashboard=CONTROL,
        expr='max by (model_name, engine_id, backend) (kvguard_controller_state{state=~"bypass|half-open"}'
        ' or kvguard_offload_mode{mode="off"}) == 1',
        summary="Remote reads have been off for an hour.",
        description=f"{_WHERE}: bypassed by the guard or switched off by an operator. Has the link healed, or was the"
        " switch forgotten?",
    ),
    Alert(
        name="KVGuardSLAUnattainable", severity="warning", wait="5m", dashboard=CONTROL,
        expr="min by (model_name, engine_id, backend) (kvguard_sla_attainable) == 0",
        summary="Neither reading nor recomputing is projected to meet the TTFT objective.",
        description=f"{_WHERE}: no choice of the guard helps; it needs capacity, or another objective.",
    ),
    Alert(
        name="KVGuardProjectionErrorHigh", severity="warning", wait="15m", dashboard=CONTROL,
        expr=f"max by (model_name, engine_id, backend, choice) (kvguard_projection_error_ratio) > {t.PROJECTION_ERROR}",
        summary="Projected TTFT is far from what happens.",
        description=f"{_WHERE}: the median error of choice {{{{ $labels.choice }}}} is"
        " {{ $value | humanizePercentage }}; the guard decides by these projections.",
    ),
    Alert(
        name="KVGuardNoHits", severity="warning", wait="15m", dashboard=OVERVIEW,
        expr="sum by (model_name, engine_id, backend) (increase(kvguard_kv_lookup_duration_seconds_count[1h]))"
        f" > {t.LOOKUPS_PER_HOUR}"
        " unless on (model_name, engine_id, backend)"
        " sum by (model_name, engine_id, backend) (increase(kvguard_kv_fetch_duration_seconds_count[1h])) > 0",
        summary="Offload is enabled and never hits.",
        description=f"{_WHERE}: {{{{ $value | humanize }}}} lookups in an hour and not one fetch: every request pays the"
        " lookup for nothing.",
    ),
)  # fmt: skip

_TRANSPORT: Final = (
    Alert(
        name="KVGuardFetchStalled", severity="warning", wait="30s", dashboard=TRANSPORT,
        expr=f"max by (model_name, engine_id, backend) (kvguard_kv_fetch_oldest_age_seconds) > {t.FETCH_AGE_SECONDS}",
        summary="A remote read has not come back.",
        description=f"{_WHERE}: the oldest read in flight began {{{{ $value | humanizeDuration }}}} ago.",
    ),
    Alert(
        name="KVGuardProbeFailing", severity="warning", wait="2m", dashboard=TRANSPORT,
        expr='sum by (prober, target) (rate(kvguard_probes_total{outcome="failed"}[5m]))'
        f" / sum by (prober, target) (rate(kvguard_probes_total[5m])) > {t.PROBE_FAILURES}",
        summary="Probes of a store fail.",
        description="{{ $labels.prober }} {{ $labels.target }}: {{ $value | humanizePercentage }} of probes failed in"
        " 5 minutes. Without RTT the guard goes by what fetches take.",
    ),
)  # fmt: skip

_TELEMETRY: Final = (
    Alert(
        name="KVGuardEngineSilent", severity="warning", wait="2m", dashboard=CONTROL,
        expr=f"max by (engine_id) (kvguard_directive_age_seconds) > {t.SILENT_SECONDS}",
        summary="An engine's hook has stopped polling.",
        description="{{ $labels.engine_id }}: no poll for {{ $value | humanizeDuration }}. The engine or its network is"
        " down; others are not affected.",
    ),
    Alert(
        name="KVGuardDirectiveStale", severity="warning", wait="30s", dashboard=CONTROL,
        expr=f"max by (engine_id) (kvguard_directive_age_seconds) > {t.LEASE_SECONDS}",
        summary="An engine's directive has run out.",
        description="{{ $labels.engine_id }}: last poll {{ $value | humanizeDuration }} ago, longer than the lease: the"
        " hook behaves as without kvguard.",
    ),
    Alert(
        name="KVGuardRecordsDropped", severity="warning", wait="1m", dashboard=TRANSPORT,
        expr="sum by (engine_id) (increase(kvguard_hook_records_dropped_total[10m])) > 0",
        summary="A hook loses records.",
        description="{{ $labels.engine_id }}: {{ $value | humanize }} records lost in 10 minutes; figures of this engine"
        " are incomplete.",
    ),
    Alert(
        name="KVGuardHookErrors", severity="warning", wait="1m", dashboard=TRANSPORT,
        expr="sum by (engine_id) (increase(kvguard_hook_errors_total[10m])) > 0",
        summary="A hook has internal errors.",
        description="{{ $labels.engine_id }}: {{ $value | humanize }} in 10 minutes. vLLM is not disturbed; after too many"
        " the hook becomes a pass-through until vLLM restarts.",
    ),
    Alert(
        name="KVGuardTelemetryGap", severity="warning", wait="10m", dashboard=TRANSPORT,
        expr="sum by (engine_id) (rate(vllm:request_success_total[5m])"
        f" * on (instance, engine) group_left (engine_id) {ENGINE}) > 0"
        " unless on (engine_id) sum by (engine_id) (rate(kvguard_decisions_total[5m])) > 0"
        ' unless on () kvguard_decisions_total{engine_id="other"}',
        summary="An engine serves requests and kvguard hears of none.",
        description="{{ $labels.engine_id }}: vLLM finishes {{ $value | humanize }} requests per second, records of them do"
        " not arrive.",
    ),
    Alert(
        name="KVGuardIngestLosing", severity="warning", wait="10m", dashboard=TRANSPORT,
        expr='sum by (instance) (increase(kvguard_ingest_spans_total{outcome="rejected"}[10m])'
        " or increase(kvguard_ingest_lost_spans_total[10m]))"
        f" / sum by (instance) (increase(kvguard_ingest_spans_total[10m])) > {t.LOST_SPANS}",
        summary="The service rejects or drops spans.",
        description="{{ $labels.instance }}: {{ $value | humanizePercentage }} of the spans of 10 minutes.",
    ),
    Alert(
        name="KVGuardResidualHigh", severity="warning", wait="15m", dashboard=OVERVIEW,
        expr="sum by (model_name, engine_id) (rate(kvguard_ttft_residual_seconds_sum[15m]))"
        f" / sum by (model_name, engine_id) (rate(kvguard_ttft_seconds_sum[15m])) > {t.RESIDUAL}",
        summary="Measured parts do not add up to TTFT.",
        description="{{ $labels.model_name }}, engine {{ $labels.engine_id }}: {{ $value | humanizePercentage }} of TTFT is"
        " unexplained; attribution is that uncertain.",
    ),
)  # fmt: skip

_SERVICE: Final = (
    Alert(
        name="KVGuardDown", severity="critical", wait="2m", dashboard=OVERVIEW,
        expr=f'absent(up{{job="{t.JOB}"}})',
        summary="No kvguard is being scraped.",
        description="Prometheus has no target of job {{ $labels.job }}. Hooks go on as without kvguard when their lease"
        " runs out.",
    ),
    Alert(
        name="KVGuardInstanceUnreachable", severity="critical", wait="1m", dashboard=OVERVIEW,
        expr=f'up{{job="{t.JOB}"}} == 0',
        summary="kvguard cannot be scraped.",
        description="{{ $labels.instance }} does not answer. Hooks go on as without kvguard when their lease runs out.",
    ),
    Alert(
        name="KVGuardLoopStalled", severity="critical", wait="1m", dashboard=OVERVIEW,
        expr=f"time() - kvguard_control_loop_last_run_timestamp_seconds > {t.LOOP_STALLED_SECONDS}",
        summary="kvguard's control loop does not turn.",
        description="{{ $labels.instance }}: last tick {{ $value | humanizeDuration }} ago. It answers but neither joins"
        " nor decides.",
    ),
)  # fmt: skip

GROUPS: Final = (
    ("kvguard-crossings", _CROSSINGS),
    ("kvguard-objective", _BURN),
    ("kvguard-guard", _GUARD),
    ("kvguard-transport", _TRANSPORT),
    ("kvguard-telemetry", _TELEMETRY),
    ("kvguard-service", _SERVICE),
)
ALERTS: Final = tuple(alert for _, group in GROUPS for alert in group)
