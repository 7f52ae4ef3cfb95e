"""Every public name of kvguard: spans, attributes, metrics, labels. Names live here and nowhere else.

Standard OpenTelemetry names come first; our own live under `kvguard.`. Durations are seconds as floats, sizes are
integers (bytes, tokens, blocks). Standard library only: the hook imports this inside vLLM.
"""

from typing import Final, NamedTuple

SCHEMA: Final = 1
"""Version of the directive and of the span contract that this code speaks."""

SCOPE: Final = "kvguard"
"""Instrumentation scope name of the hook's spans."""

DEFAULT_PORT: Final = 8420
"""Port of the service; not in common use beside vLLM (8000), OTLP (4317, 4318), Vault and Elastic APM (8200)."""

# -- Spans ------------------------------------------------------------------------------------------------------------
SPAN_REQUEST: Final = "kvguard.request"
SPAN_LOOKUP: Final = "kvguard.kv.lookup"
SPAN_FETCH: Final = "kvguard.kv.fetch"
SPAN_LOAD: Final = "kvguard.kv.load"  # one worker rank's share of a fetch, on that worker's clock (docs/adr)
SPAN_READ: Final = "kvguard.kv.read"
SPAN_STORE: Final = "kvguard.kv.store"
SPAN_DECODE: Final = "kvguard.decode"
SPAN_VLLM_REQUEST: Final = "llm_request"
LMCACHE_SPAN_PREFIX: Final = "mp."
LMCACHE_SESSION_ID: Final = "session_id"

# -- Attributes: standard ---------------------------------------------------------------------------------------------
REQUEST_ID: Final = "gen_ai.request.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
VLLM_TTFT: Final = "gen_ai.latency.time_to_first_token"
VLLM_QUEUE: Final = "gen_ai.latency.time_in_queue"
VLLM_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
VLLM_E2E: Final = "gen_ai.latency.e2e"

# -- Attributes: kvguard ----------------------------------------------------------------------------------------------
INTERNAL_ID: Final = "kvguard.request.internal_id"
ENGINE_ID: Final = "kvguard.engine_id"
BACKEND: Final = "kvguard.backend"
RANK: Final = "kvguard.rank"
TOKENS: Final = "kvguard.tokens"
TOKENS_LOCAL: Final = "kvguard.tokens.local"
TOKENS_MATCHED: Final = "kvguard.tokens.remote_matched"
TOKENS_LOADED: Final = "kvguard.tokens.remote_loaded"
TOKENS_COMPUTED: Final = "kvguard.tokens.computed"
TTFT: Final = "kvguard.ttft"
TIME_INTAKE: Final = "kvguard.time.intake"  # i:  arrival -> the scheduler sees the request
TIME_QUEUE: Final = "kvguard.time.queue"  # q1: -> the lookup starts
TIME_LOOKUP: Final = "kvguard.time.lookup"  # u:  lookup, all polls
TIME_SLOT: Final = "kvguard.time.slot"  # q2: match known -> blocks allocated
TIME_FETCH: Final = "kvguard.time.fetch"  # f:  -> KV usable, failed attempts included
TIME_RESUME: Final = "kvguard.time.resume"  # q3: KV usable -> first scheduled
TIME_PREFILL: Final = "kvguard.time.prefill"  # p:  -> first token
EXPOSED_WAIT: Final = "kvguard.exposed_wait"
DECISION: Final = "kvguard.decision"
DECISION_REASON: Final = "kvguard.decision.reason"
DIRECTIVE_ID: Final = "kvguard.directive.id"
PROPENSITY: Final = "kvguard.decision.propensity"  # probability of the road taken, where it was drawn (hold-out)
RUNNING: Final = "kvguard.running"
WAITING: Final = "kvguard.waiting"
ABORTED: Final = "kvguard.aborted"
POLLS: Final = "kvguard.polls"
ATTEMPT: Final = "kvguard.attempt"
BLOCKS: Final = "kvguard.blocks"
BYTES: Final = "kvguard.bytes"
INFLIGHT: Final = "kvguard.inflight"
ROUND_TRIPS: Final = "kvguard.round_trips"
NETWORK_RTT: Final = "kvguard.network.rtt"
OUTCOME: Final = "kvguard.outcome"
BATCH: Final = "kvguard.batch"
OPERATION: Final = "kvguard.operation"
KEYS: Final = "kvguard.keys"
TPOT: Final = "kvguard.tpot"
HANDOFF: Final = "kvguard.handoff"  # true where the load is a prefill/decode transfer: traced, never declined
SAMPLED: Final = "kvguard.sampled"  # false where the caller's trace is not sampled: not to be forwarded
SIMULATED: Final = "kvguard.simulated"  # true where the span comes from the built-in traffic source

TIME_PARTS: Final = (TIME_INTAKE, TIME_QUEUE, TIME_LOOKUP, TIME_SLOT, TIME_FETCH, TIME_RESUME, TIME_PREFILL)
"""The seven parts of TTFT in the order in which they happen; their sum and the residual make TTFT."""

# -- Attribute values -------------------------------------------------------------------------------------------------
DECISION_REMOTE: Final = "remote"
DECISION_DECLINE: Final = "decline"
DECISION_SKIP: Final = "skip"
DECISION_OTHER_TIER: Final = "other-tier"
DECISION_NONE: Final = "none"
DECISIONS: Final = (DECISION_REMOTE, DECISION_DECLINE, DECISION_SKIP, DECISION_OTHER_TIER, DECISION_NONE)

OUTCOME_OK: Final = "ok"
OUTCOME_FAILED: Final = "failed"
OUTCOME_PARTIAL: Final = "partial"
OUTCOMES: Final = (OUTCOME_OK, OUTCOME_FAILED, OUTCOME_PARTIAL)

MODE_ON: Final = "on"
MODE_OFF: Final = "off"
MODE_AUTO: Final = "auto"
MODE_OBSERVE: Final = "observe"
MODES: Final = (MODE_ON, MODE_OFF, MODE_AUTO, MODE_OBSERVE)

LEASE_KEEP: Final = "keep"
LEASE_OPEN: Final = "open"
LEASE_EXPIRY: Final = (LEASE_KEEP, LEASE_OPEN)

EVENT_RTT: Final = "rtt"  # the idle RTT of a target has shifted
EVENT_DEPARTURE: Final = "departure"  # RTT crossed the departure point of a backend and class
EVENT_BREAK_EVEN: Final = "break-even"  # RTT crossed the break-even point of a backend and class
EVENT_CONTROLLER: Final = "controller"  # the controller changed its state for an engine and backend
EVENT_SWITCH: Final = "switch"  # an operator switched, or a switch ran out
EVENT_ENGINE: Final = "engine"  # an engine came, fell silent, or came back
EVENT_SLA: Final = "sla"  # neither choice meets the objective, or one does again
EVENT_KINDS: Final = (
    EVENT_RTT, EVENT_DEPARTURE, EVENT_BREAK_EVEN, EVENT_CONTROLLER, EVENT_SWITCH, EVENT_ENGINE, EVENT_SLA,
)  # fmt: skip

# -- Resource ---------------------------------------------------------------------------------------------------------
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_VERSION: Final = "service.version"
HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"
RECORDS_DROPPED: Final = "kvguard.hook.records_dropped"  # resource attribute: records lost so far in that process
HOOK_READS: Final = "kvguard.hook.reads"  # resource attribute: JSON, backend -> [in flight, bytes, oldest age in s]
HOOK_ERRORS: Final = "kvguard.hook.errors"  # resource attribute: internal errors so far in that process

# -- Histogram buckets, seconds. SLA bounds (0.2, 0.5, 1, 2, 5, 10) lie on edges ---------------------------------------
FETCH_BUCKETS: Final = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0,
    60.0,
)  # fmt: skip
TTFT_BUCKETS: Final = (
    5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 60.0, 120.0,
    240.0,
)  # fmt: skip


class Metric(NamedTuple):
    """One Prometheus metric: its full name, type, help line, labels and (histograms) bucket edges in seconds."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_PER_BACKEND = ("model_name", "engine_id", "backend", "class")
_PER_ENGINE_BACKEND = ("model_name", "engine_id", "backend")

KV_LOOKUP_DURATION: Final = Metric(
    "kvguard_kv_lookup_duration_seconds", "histogram",
    "Time from the first remote lookup call of a request to its answer.", _PER_BACKEND, FETCH_BUCKETS,
)  # fmt: skip
KV_FETCH_DURATION: Final = Metric(
    "kvguard_kv_fetch_duration_seconds", "histogram",
    "Time of one fetch attempt: blocks allocated to KV usable.", (*_PER_BACKEND, "outcome"), FETCH_BUCKETS,
)  # fmt: skip
KV_MISS_LATENCY: Final = Metric(
    "kvguard_kv_miss_latency_seconds", "histogram",
    "Local miss to KV usable: lookup + wait for a slot + fetch.", _PER_BACKEND, FETCH_BUCKETS,
)  # fmt: skip
KV_EXPOSED_WAIT: Final = Metric(
    "kvguard_kv_exposed_wait_seconds", "histogram",
    "Part of the miss latency that is not hidden behind other work of the same request.", _PER_BACKEND, FETCH_BUCKETS,
)  # fmt: skip
KV_FETCH_BYTES: Final = Metric(
    "kvguard_kv_fetch_bytes_total", "counter", "Bytes moved by fetches that succeeded.", _PER_BACKEND,
)  # fmt: skip
TTFT_SECONDS: Final = Metric(
    "kvguard_ttft_seconds", "histogram", "Arrival to first token, seen at the scheduler.",
    (*_PER_BACKEND, "decision"), TTFT_BUCKETS,
)  # fmt: skip
TTFT_RESIDUAL: Final = Metric(
    "kvguard_ttft_residual_seconds", "histogram",
    "Absolute difference between TTFT and the sum of its measured parts.", ("model_name", "engine_id"), FETCH_BUCKETS,
)  # fmt: skip
KV_FETCH_INFLIGHT: Final = Metric(
    "kvguard_kv_fetch_inflight", "gauge", "Remote reads in flight, as the hook last told.", _PER_ENGINE_BACKEND,
)  # fmt: skip
KV_FETCH_OLDEST_AGE: Final = Metric(
    "kvguard_kv_fetch_oldest_age_seconds", "gauge", "Age of the oldest remote read in flight; 0 when there is none.",
    _PER_ENGINE_BACKEND,
)  # fmt: skip
TTFT_PROJECTED: Final = Metric(
    "kvguard_ttft_projected_seconds", "gauge",
    "Projected TTFT of the class's reference request at the objective's percentile, by choice (remote, recompute).",
    (*_PER_BACKEND, "choice"),
)  # fmt: skip
PROJECTION_ERROR: Final = Metric(
    "kvguard_projection_error_ratio", "gauge",
    "Median of |actual - projected| / actual TTFT over the requests of the window, by choice.",
    (*_PER_ENGINE_BACKEND, "choice"),
)  # fmt: skip
RTT_SECONDS: Final = Metric(
    "kvguard_rtt_seconds", "histogram", "Round-trip time to a target, one value per probe.", ("prober", "target"),
    FETCH_BUCKETS,
)  # fmt: skip
RTT_IDLE: Final = Metric(
    "kvguard_rtt_idle_seconds", "gauge", "Idle round-trip time: the least of the last probes.", ("prober", "target"),
)  # fmt: skip
PROBES_TOTAL: Final = Metric(
    "kvguard_probes_total", "counter", "Probes by outcome (ok, failed).", ("prober", "target", "outcome"),
)  # fmt: skip
INFLECTION_RTT: Final = Metric(
    "kvguard_inflection_rtt_seconds", "gauge",
    "RTT of departure, break-even and knee, and the idle RTT now and its floor (kind: departure, break-even, knee, now,"
    " floor): estimate and ends of its 95 % interval (bound: value, low, high).",
    ("model_name", "backend", "class", "kind", "bound", "source"),
)  # fmt: skip
VERDICT: Final = Metric(
    "kvguard_verdict", "gauge",
    "1 for the answer that holds, per dimension (state, cause, shape); other answers have no series.",
    ("model_name", "backend", "class", "dimension", "value"),
)  # fmt: skip
EVENTS_TOTAL: Final = Metric(
    "kvguard_events_total", "counter", "Events by kind: crossings, switches, changes of the controller's state.",
    ("kind",),
)  # fmt: skip
CONTROLLER_STATE: Final = Metric(
    "kvguard_controller_state", "gauge",
    "1 for the state of the controller (open, limited, bypass, half-open); other states have no series.",
    (*_PER_ENGINE_BACKEND, "state"),
)  # fmt: skip
READS_LIMIT: Final = Metric(
    "kvguard_reads_limit", "gauge",
    "Limits in force on remote reads (limit: max_inflight, max_inflight_bytes, min_tokens, share); no series: none.",
    (*_PER_ENGINE_BACKEND, "limit"),
)  # fmt: skip
SLA_REQUESTS: Final = Metric(
    "kvguard_sla_requests_total", "counter",
    "Requests with a first token, by outcome against the objective (met, missed).",
    ("model_name", "engine_id", "class", "outcome"),
)  # fmt: skip
SLA_TTFT: Final = Metric(
    "kvguard_sla_ttft_seconds", "gauge", "Bound on TTFT that the objective sets at its percentile.",
    ("model_name", "class", "percentile"),
)  # fmt: skip
SLA_BUDGET: Final = Metric(
    "kvguard_sla_budget_ratio", "gauge", "Share of requests that the objective lets miss its bound: 1 - percentile.",
    ("model_name", "class"),
)  # fmt: skip
SLA_ATTAINABLE: Final = Metric(
    "kvguard_sla_attainable", "gauge",
    "0 where neither remote nor recompute is projected to meet the objective, else 1.",
    _PER_ENGINE_BACKEND,
)  # fmt: skip
DECISIONS_TOTAL: Final = Metric(
    "kvguard_decisions_total", "counter", "Requests by road taken and why.",
    ("model_name", "engine_id", "backend", "decision", "reason"),
)  # fmt: skip
OFFLOAD_MODE: Final = Metric(
    "kvguard_offload_mode", "gauge",
    "1 for the mode that is asked of this engine and backend; other modes have no series.",
    ("model_name", "engine_id", "backend", "mode"),
)  # fmt: skip
DIRECTIVE_AGE: Final = Metric(
    "kvguard_directive_age_seconds", "gauge", "Time since the engine's hook last polled for its directive.",
    ("engine_id",),
)  # fmt: skip
ENGINE_INFO: Final = Metric(
    "kvguard_engine_info", "gauge", "1; joins engine_id to vLLM's own series.",
    ("engine_id", "vllm_instance", "engine", "model_name"),
)  # fmt: skip
HOOK_RECORDS_DROPPED: Final = Metric(
    "kvguard_hook_records_dropped_total", "counter",
    "Records that a hook's full ring or a failed export lost.", ("engine_id",),
)  # fmt: skip
HOOK_ERRORS_TOTAL: Final = Metric(
    "kvguard_hook_errors_total", "counter", "Internal errors of a hook; vLLM was not disturbed.", ("engine_id",),
)  # fmt: skip
INGEST_SPANS: Final = Metric(
    "kvguard_ingest_spans_total", "counter", "Spans received, by outcome (accepted, rejected, ignored).", ("outcome",),
)  # fmt: skip
INGEST_REQUESTS: Final = Metric(
    "kvguard_ingest_requests_total", "counter", "OTLP requests received, by HTTP status.", ("status",),
)  # fmt: skip
INGEST_ORPHANS: Final = Metric(
    "kvguard_ingest_orphans_total", "counter",
    "Spans whose request span did not arrive before the watermark, by kind.", ("kind",),
)  # fmt: skip
INGEST_LOST: Final = Metric(
    "kvguard_ingest_lost_spans_total", "counter",
    "Spans that the join dropped to bound its memory, by kind and cause (evicted, overflow).", ("kind", "cause"),
)  # fmt: skip
FORWARD_SPANS: Final = Metric(
    "kvguard_forward_spans_total", "counter",
    "Spans forwarded to the configured OTLP endpoint, by outcome (sent, dropped, failed).", ("outcome",),
)  # fmt: skip
HISTORY_ROWS: Final = Metric(
    "kvguard_history_rows_total", "counter", "Requests for the history on disk, by outcome (written, lost).",
    ("outcome",),
)  # fmt: skip
ESTIMATE_LOST: Final = Metric(
    "kvguard_estimate_lost_requests_total", "counter",
    "Requests, and amended ones once more, for which the estimates had no room between two fits.",
)  # fmt: skip
JOIN_PENDING: Final = Metric(
    "kvguard_join_pending_requests", "gauge", "Requests that wait for more of their spans.",
)  # fmt: skip
LOOP_LAST_RUN: Final = Metric(
    "kvguard_control_loop_last_run_timestamp_seconds", "gauge", "Unix time of the last tick of the service.",
)  # fmt: skip
LOOP_LAG: Final = Metric(
    "kvguard_control_loop_lag_seconds", "gauge", "Longest delay of a tick of the service since the last scrape.",
)  # fmt: skip
BUILD_INFO: Final = Metric("kvguard_build_info", "gauge", "1; the version that runs.", ("version",))

METRICS: Final = (
    KV_LOOKUP_DURATION, KV_FETCH_DURATION, KV_MISS_LATENCY, KV_EXPOSED_WAIT, KV_FETCH_BYTES, KV_FETCH_INFLIGHT,
    KV_FETCH_OLDEST_AGE, TTFT_SECONDS, TTFT_RESIDUAL, TTFT_PROJECTED, PROJECTION_ERROR, RTT_SECONDS, RTT_IDLE,
    PROBES_TOTAL, INFLECTION_RTT, VERDICT, EVENTS_TOTAL, CONTROLLER_STATE, READS_LIMIT, SLA_REQUESTS, SLA_TTFT,
    SLA_BUDGET, SLA_ATTAINABLE, DECISIONS_TOTAL, OFFLOAD_MODE, DIRECTIVE_AGE, ENGINE_INFO, HOOK_RECORDS_DROPPED,
    HOOK_ERRORS_TOTAL, INGEST_SPANS, INGEST_REQUESTS, INGEST_ORPHANS, INGEST_LOST, FORWARD_SPANS, HISTORY_ROWS,
    ESTIMATE_LOST, JOIN_PENDING, LOOP_LAST_RUN, LOOP_LAG, BUILD_INFO,
)  # fmt: skip
"""Every metric that the service exposes, in the order of docs/metrics.md."""
