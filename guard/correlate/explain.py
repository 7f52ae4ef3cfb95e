"""One request explained: its timeline, its reads, and in words what made it slow."""

from datetime import UTC, datetime
from typing import Any

from guard import semconv as s
from guard.correlate.records import PARTS
from guard.wire import FetchRecord, RequestRecord

_MEANING = {
    "intake": "hand-over from the API server to the scheduler",
    "queue": "waiting to be looked at by the scheduler",
    "lookup": "asking the remote tier what it has",
    "slot": "waiting for blocks to load into",
    "fetch": "loading KV from the remote tier",
    "resume": "waiting to be scheduled after the load",
    "prefill": "computing to the first token",
}


def explain(record: RequestRecord) -> dict[str, Any]:
    """The body of `GET /v1/requests/{id}` for one record. Times in seconds; starts count from arrival."""
    timeline, at = [], 0.0
    for part in PARTS:
        seconds = getattr(record, part)
        timeline.append({"part": part, "start_seconds": at, "seconds": seconds, "meaning": _MEANING[part]})
        at += seconds
    return {
        "internal_id": record.internal_id,
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "engine_id": record.engine_id,
        "model": record.model,
        "backend": record.backend,
        "class": record.class_,
        "arrival": datetime.fromtimestamp(record.arrival_ns / 1e9, UTC).isoformat(),
        "decision": record.decision,
        "reason": record.reason,
        "directive_id": record.directive_id,
        "aborted": record.aborted,
        "handoff": record.handoff,
        "simulated": record.simulated,
        "tokens": {
            "prompt": record.prompt_tokens,
            "local": record.tokens_local,
            "remote_matched": record.tokens_matched,
            "remote_loaded": record.tokens_loaded,
            "computed": record.tokens_computed,
            "output": record.output_tokens,
        },
        "load": {"running": record.running, "waiting": record.waiting},
        "ttft_seconds": record.ttft,
        "miss_latency_seconds": record.miss_latency,
        "exposed_wait_seconds": record.exposed_wait,
        "residual_seconds": record.residual,
        "tpot_seconds": record.tpot,
        "timeline": timeline,
        "lookup": {"round_trips": record.lookup_round_trips, "polls": record.lookup_polls},
        "fetches": [_fetch(record, fetch) for fetch in record.fetches],
        "stores": {"n": record.stores, "bytes": record.store_bytes},
        "vllm": {
            "ttft_seconds": record.vllm_ttft,
            "queue_seconds": record.vllm_queue,
            "prefill_seconds": record.vllm_prefill,
            "e2e_seconds": record.vllm_e2e,
        },
        "server_spans": [
            {"name": span.name, "start_seconds": _since(record, span.start_ns), "seconds": span.seconds}
            for span in record.server_spans
        ],
        "words": _words(record),
        "source": "measured",
    }


def _fetch(record: RequestRecord, fetch: FetchRecord) -> dict[str, Any]:
    return {
        "attempt": fetch.attempt,
        "start_seconds": _since(record, fetch.start_ns),
        "seconds": fetch.seconds,
        "outcome": fetch.outcome,
        "error_type": fetch.error_type,
        "tokens": fetch.tokens,
        "blocks": fetch.blocks,
        "bytes": fetch.bytes,
        "inflight": fetch.inflight,
        "round_trips": fetch.round_trips,
        "network_rtt_seconds": fetch.network_rtt,
        "batch": fetch.batch,
        "ranks": {str(rank): seconds for rank, seconds in fetch.ranks.items()},
        "slowest_rank_seconds": max(fetch.ranks.values(), default=None),
        "reads": {"n": fetch.reads, "seconds": fetch.read_seconds, "bytes": fetch.read_bytes},
    }


def _words(record: RequestRecord) -> list[str]:
    words = []
    if record.ttft is None:
        words.append("aborted before a first token" if record.aborted else "no first token was seen")
    elif record.ttft > 0.0:
        part = max(PARTS, key=lambda name: getattr(record, name))
        seconds, ttft = getattr(record, part), record.ttft
        share = f"{part} took {seconds / ttft:.0%} of TTFT ({_time(seconds)} of {_time(ttft)})"
        words.append(f"{share}: {_MEANING[part]}")
    if record.handoff:
        words.append("the KV came from a prefill instance: a hand-off, not a hit")
    elif record.decision == s.DECISION_REMOTE:
        words.append(f"read {record.tokens_loaded} of {record.prompt_tokens} prompt tokens from {record.backend}")
    elif record.decision != s.DECISION_NONE:
        words.append(f"decision {record.decision}" + (f": {record.reason}" if record.reason else ""))
    for fetch in record.fetches:
        if fetch.outcome != s.OUTCOME_OK:
            why = f" ({fetch.error_type})" if fetch.error_type else ""
            words.append(f"fetch attempt {fetch.attempt} {fetch.outcome} after {_time(fetch.seconds)}{why}")
    if record.lookup > 0.0 and not record.tokens_matched:
        words.append(f"the lookup took {_time(record.lookup)} and found nothing")
    if record.ttft and record.residual is not None and abs(record.residual) > 0.05 * record.ttft:
        words.append(f"{_time(abs(record.residual))} of TTFT are not explained by its parts")
    if record.clamped:
        words.append("out of range as sent, put right: " + ", ".join(record.clamped))
    return words


def _since(record: RequestRecord, at_ns: int) -> float:
    return (at_ns - record.arrival_ns) / 1e9


def _time(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
