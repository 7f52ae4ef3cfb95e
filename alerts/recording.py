"""Recording rules: the shares behind the burn alerts, and what joins vLLM's own series with kvguard's."""

from typing import Final

from alerts import thresholds
from alerts.shapes import Record

WINDOWS: Final = tuple(dict.fromkeys(window for row in thresholds.BURN for window in (row[3], row[2])))
"""The windows of the burn alerts: 5m, 1h, 30m, 6h, 2h, 1d, 3d."""

ENGINE: Final = 'max by (instance, engine, engine_id) (label_replace(kvguard_engine_info, "instance", "$1", "vllm_instance", "(.+)"))'
"""kvguard_engine_info under the labels of vLLM's own series."""


def burn_ratio(window: str) -> str:
    """Name of the rule that holds a model's share of missed requests."""
    return f"model_name:kvguard_sla_missed:ratio_rate{window}"


def _burn(window: str) -> Record:
    everything = f"sum by (model_name) (rate(kvguard_sla_requests_total[{window}]))"
    missed = f'sum by (model_name) (rate(kvguard_sla_requests_total{{outcome="missed"}}[{window}]))'
    return Record(record=burn_ratio(window), expr=f"({missed} or {everything} * 0) / ({everything} > 0)")


def _quantile(record: str, metric: str, by: str, quantile: float) -> Record:
    return Record(record=record, expr=f"histogram_quantile({quantile}, sum by ({by}, le) (rate({metric}_bucket[5m])))")


def _joined(expr: str) -> str:
    return f"sum by (engine_id) ({expr} * on (instance, engine) group_left (engine_id) {ENGINE})"


_QUEUED: Final = _joined("rate(vllm:request_queue_time_seconds_sum[5m])")
_QUEUED_COUNT: Final = _joined("rate(vllm:request_queue_time_seconds_count[5m])")

BURN: Final = (
    *map(_burn, WINDOWS),
    Record(record="model_name:kvguard_sla_budget_ratio:min", expr="min by (model_name) (kvguard_sla_budget_ratio)"),
)

QUANTILES: Final = (
    _quantile(
        "model_name_backend_class_decision:kvguard_ttft_seconds:p50_rate5m",
        "kvguard_ttft_seconds", "model_name, backend, class, decision", 0.5,
    ),
    _quantile("model_name_backend:kvguard_ttft_seconds:p95_rate5m", "kvguard_ttft_seconds", "model_name, backend", 0.95),
    _quantile(
        "model_name_backend:kvguard_kv_miss_latency_seconds:p95_rate5m",
        "kvguard_kv_miss_latency_seconds", "model_name, backend", 0.95,
    ),
)  # fmt: skip

# vLLM counts the lookup and fetch of an asynchronous connector as time in queue: take kvguard's miss latency out of it.
VLLM: Final = (
    Record(record="engine_id:vllm_request_queue_time_seconds:mean_rate5m", expr=f"{_QUEUED} / ({_QUEUED_COUNT} > 0)"),
    Record(
        record="engine_id:vllm_queue_without_remote_seconds:mean_rate5m",
        expr=f"clamp_min({_QUEUED} - (sum by (engine_id) (rate(kvguard_kv_miss_latency_seconds_sum[5m])) or {_QUEUED} * 0), 0)"
        f" / ({_QUEUED_COUNT} > 0)",
    ),
    Record(
        record="engine_id:vllm_external_prefix_cache_hits:ratio_rate5m",
        expr=_joined("rate(vllm:external_prefix_cache_hits_total[5m])")
        + " / (" + _joined("rate(vllm:external_prefix_cache_queries_total[5m])") + " > 0)",
    ),
)  # fmt: skip

GROUPS: Final = (("kvguard-burn", BURN), ("kvguard-quantiles", QUANTILES), ("kvguard-vllm", VLLM))
