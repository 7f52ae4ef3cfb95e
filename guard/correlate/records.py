"""Makes the joined row from a request's span, and a fetch record from a fetch's; puts absurd counts right."""

from collections.abc import Mapping
from typing import Any

from guard import semconv as s
from guard.classes import class_of
from guard.wire import AttributeValue, FetchRecord, RequestRecord, Span


def request_record(span: Span, resource: Mapping[str, AttributeValue]) -> RequestRecord:
    """The row of one `kvguard.request` span. What the span does not say is 0, empty or None.

    Hit tokens that are negative, or that make more than the prompt when added up, are clamped and named in `clamped`.
    """
    get: Any = span.attributes.get
    clamped: list[str] = []
    prompt, local = get(s.INPUT_TOKENS, 0), get(s.TOKENS_LOCAL, 0)
    matched, loaded = get(s.TOKENS_MATCHED, 0), get(s.TOKENS_LOADED, 0)
    computed, running, waiting = get(s.TOKENS_COMPUTED), get(s.RUNNING, 0), get(s.WAITING, 0)
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
    intake, queue, lookup, slot, fetch, resume, prefill = parts = [get(key, 0.0) for key in s.TIME_PARTS]
    if min(parts) < 0.0:
        intake, queue, lookup, slot, fetch, resume, prefill = (
            _within(value, None, key, clamped) for key, value in zip(s.TIME_PARTS, parts, strict=True)
        )
    record = RequestRecord(
        internal_id=get(s.INTERNAL_ID, ""),
        request_id=get(s.REQUEST_ID, ""),
        trace_id=span.trace_id,
        span_id=span.span_id,
        engine_id=get(s.ENGINE_ID) or str(resource.get(s.SERVICE_INSTANCE_ID, "")),
        model=get(s.REQUEST_MODEL, ""),
        backend=get(s.BACKEND, ""),
        class_=class_of(prompt, running),
        arrival_ns=span.start_ns,
        prompt_tokens=prompt,
        tokens_local=local,
        tokens_matched=matched,
        tokens_loaded=loaded,
        tokens_computed=computed,
        ttft=get(s.TTFT),
        intake=intake,
        queue=queue,
        lookup=lookup,
        slot=slot,
        fetch=fetch,
        resume=resume,
        prefill=prefill,
        residual=None,
        exposed_wait=get(s.EXPOSED_WAIT, 0.0),
        decision=get(s.DECISION, s.DECISION_NONE),
        reason=get(s.DECISION_REASON, ""),
        directive_id=get(s.DIRECTIVE_ID, ""),
        running=running,
        waiting=waiting,
        aborted=get(s.ABORTED, False),
        handoff=get(s.HANDOFF, False),
        simulated=get(s.SIMULATED, False),
        propensity=get(s.PROPENSITY),
        clamped=tuple(clamped),
    )
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
    get: Any = span.attributes.get
    return FetchRecord(
        span_id=span.span_id,
        attempt=get(s.ATTEMPT, 1),
        start_ns=span.start_ns,
        seconds=span.seconds,
        outcome=get(s.OUTCOME) or (s.OUTCOME_FAILED if span.error else s.OUTCOME_OK),
        tokens=get(s.TOKENS, 0),
        blocks=get(s.BLOCKS, 0),
        bytes=get(s.BYTES, 0),
        inflight=get(s.INFLIGHT, 0),
        round_trips=get(s.ROUND_TRIPS),
        network_rtt=get(s.NETWORK_RTT),
        batch=get(s.BATCH),
        error_type=get(s.ERROR_TYPE),
        server=f"{host}:{get(s.SERVER_PORT, '')}".removesuffix(":") if (host := get(s.SERVER_ADDRESS, "")) else "",
    )


def _within(value: Any, high: int | None, key: str, clamped: list[str]) -> Any:
    if value < 0:
        clamped.append(key)
        return type(value)(0)
    if high is not None and value > high:
        clamped.append(key)
        return high
    return value
