"""Makes the joined row from a request's span, and a fetch record from a fetch's; puts absurd counts right."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from guard import semconv as s
from guard.classes import class_of
from guard.wire import AttributeValue, FetchRecord, RequestRecord, Span

PARTS: Final = tuple(name.rpartition(".")[2] for name in s.TIME_PARTS)
"""`intake`, `queue`, `lookup`, `slot`, `fetch`, `resume`, `prefill`: fields of the joined row."""

_SILENT: Final[dict[str, Any]] = {
    s.INTERNAL_ID: "", s.REQUEST_ID: "", s.ENGINE_ID: "", s.REQUEST_MODEL: "", s.BACKEND: "",
    s.INPUT_TOKENS: 0, s.TOKENS_LOCAL: 0, s.TOKENS_MATCHED: 0, s.TOKENS_LOADED: 0, s.TOKENS_COMPUTED: None,
    s.TTFT: None, **dict.fromkeys(s.TIME_PARTS, 0.0), s.EXPOSED_WAIT: 0.0,
    s.DECISION: s.DECISION_NONE, s.DECISION_REASON: "", s.DIRECTIVE_ID: "", s.RUNNING: 0, s.WAITING: 0,
    s.ABORTED: False, s.HANDOFF: False, s.SIMULATED: False, s.PROPENSITY: None,
}  # fmt: skip
"""What a request's span means where it says nothing; in the order in which `request_record` reads it."""

_SILENT_FETCH: Final[dict[str, Any]] = {
    s.ATTEMPT: 1, s.OUTCOME: "", s.TOKENS: 0, s.BLOCKS: 0, s.BYTES: 0, s.INFLIGHT: 0, s.ROUND_TRIPS: None,
    s.NETWORK_RTT: None, s.BATCH: None, s.ERROR_TYPE: None, s.SERVER_ADDRESS: "", s.SERVER_PORT: "",
}  # fmt: skip

_told = itemgetter(*_SILENT)
_told_of_fetch = itemgetter(*_SILENT_FETCH)


def request_record(span: Span, resource: Mapping[str, AttributeValue]) -> RequestRecord:
    """The record of a `kvguard.request` span; what the span does not say is 0, empty or None.

    Hit tokens that are negative, or that make more than the prompt when added up, are clamped and named in `clamped`.
    """
    (
        internal_id, request_id, engine_id, model, backend, prompt, local, matched, loaded, computed, ttft,
        intake, queue, lookup, slot, fetch, resume, prefill, exposed_wait, decision, reason, directive_id,
        running, waiting, aborted, handoff, simulated, propensity,
    ) = _told({**_SILENT, **span.attributes})  # fmt: skip
    clamped: list[str] = []
    if computed is None:
        computed = max(0, prompt - local - loaded)
    if min(prompt, local, matched, loaded, computed, running, waiting) < 0 or (
        local > prompt or matched > prompt - local or loaded > prompt - local or computed > prompt
    ):
        prompt = _within(prompt, None, s.INPUT_TOKENS, clamped)
        local = _within(local, prompt, s.TOKENS_LOCAL, clamped)
        matched = _within(matched, prompt - local, s.TOKENS_MATCHED, clamped)
        loaded = _within(loaded, prompt - local, s.TOKENS_LOADED, clamped)
        computed = _within(computed, prompt, s.TOKENS_COMPUTED, clamped)
        running = _within(running, None, s.RUNNING, clamped)
        waiting = _within(waiting, None, s.WAITING, clamped)
    if min(intake, queue, lookup, slot, fetch, resume, prefill) < 0.0:
        parts = intake, queue, lookup, slot, fetch, resume, prefill
        intake, queue, lookup, slot, fetch, resume, prefill = (
            _within(value, None, key, clamped) for key, value in zip(s.TIME_PARTS, parts, strict=True)
        )
    # By position, in the order of the fields: by name the call would cost as much as all the rest.
    record = RequestRecord(
        internal_id, request_id, span.trace_id, span.span_id,
        engine_id or str(resource.get(s.SERVICE_INSTANCE_ID, "")), model, backend, class_of(prompt, running),
        span.start_ns, prompt, local, matched, loaded, computed, ttft,
        intake, queue, lookup, slot, fetch, resume, prefill, None, exposed_wait, decision, reason, directive_id,
        running, waiting, aborted, handoff, simulated,
    )  # fmt: skip
    record.propensity = propensity
    record.clamped = tuple(clamped)
    set_residual(record)
    return record


def set_residual(record: RequestRecord) -> None:
    """Sets what of TTFT (vLLM's if known, else the hook's) its parts do not explain, seconds."""
    ttft = record.ttft if record.vllm_ttft is None else record.vllm_ttft
    if ttft is not None:
        known = record.intake + record.queue + record.lookup + record.slot
        record.residual = ttft - (known + record.fetch + record.resume + record.prefill)


def fetch_record(span: Span) -> FetchRecord:
    """The record of one `kvguard.kv.fetch` span."""
    attempt, outcome, tokens, blocks, size, inflight, round_trips, network_rtt, batch, error_type, host, port = (
        _told_of_fetch({**_SILENT_FETCH, **span.attributes})
    )
    return FetchRecord(
        span.span_id, attempt, span.start_ns, span.seconds,
        outcome or (s.OUTCOME_FAILED if span.error else s.OUTCOME_OK), tokens, blocks, size, inflight, round_trips,
        network_rtt, batch, error_type, f"{host}:{port}".removesuffix(":") if host else "",
    )  # fmt: skip


def _within(value: Any, high: int | None, key: str, clamped: list[str]) -> Any:
    if value < 0:
        clamped.append(key)
        return type(value)(0)
    if high is not None and value > high:
        clamped.append(key)
        return high
    return value
