"""OTLP bodies as a fleet sends them: every request with ids, times and sizes of its own."""

import base64
import json
import random
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard import semconv as s

SPANS_PER_BODY = 512  # the default batch of OpenTelemetry's exporters


@dataclass(frozen=True)
class Payload:
    """Bodies of one mix in one encoding."""

    mix: str
    content_type: str
    bodies: tuple[bytes, ...]
    spans: int
    requests: int


MIXES = {
    "lmcache-mp": "request + lookup + fetch + load + decode + llm_request, 6 spans a request",
    "in-process": "the same and 15-30 kv.read under the fetch, 28.5 spans a request on average",
}


def build(mix: str, spans: int, now_ns: int, seed: int) -> dict[str, Payload]:
    """The same spans in protobuf and in JSON, by content type."""
    rng = random.Random(seed)
    protobuf, text, total, requests = [], [], 0, 0
    while total < spans:
        message = ExportTraceServiceRequest()
        owner = message.resource_spans.add()
        _set(owner.resource, {s.SERVICE_NAME: "vllm", s.SERVICE_INSTANCE_ID: "10.0.0.1:8000/0", s.HOST_NAME: "node-1"})
        scope = owner.scope_spans.add()
        scope.scope.name = s.SCOPE
        while len(scope.spans) < SPANS_PER_BODY - 36:
            _request(scope, rng, now_ns, reads=rng.randint(15, 30) if mix == "in-process" else 0)
            requests += 1
        total += len(scope.spans)
        protobuf.append(message.SerializeToString())
        text.append(_json(message))
    return {
        kind: Payload(mix, kind, tuple(bodies), total, requests)
        for kind, bodies in (("application/x-protobuf", protobuf), ("application/json", text))
    }


def build_one(mix: str, now_ns: int, seed: int) -> dict[str, bytes]:
    """The spans of one request as a body, by content type."""
    message = ExportTraceServiceRequest()
    owner = message.resource_spans.add()
    _set(owner.resource, {s.SERVICE_NAME: "vllm", s.SERVICE_INSTANCE_ID: "10.0.0.1:8000/0", s.HOST_NAME: "node-1"})
    rng = random.Random(seed)
    _request(owner.scope_spans.add(), rng, now_ns, reads=rng.randint(1, 3) if mix == "in-process" else 0)
    return {"application/x-protobuf": message.SerializeToString(), "application/json": _json(message)}


def _request(scope: Any, rng: random.Random, now_ns: int, reads: int) -> None:
    trace = rng.randbytes(16)
    root, load_parent = rng.randbytes(8), rng.randbytes(8)
    external = f"cmpl-{rng.getrandbits(128):032x}"
    prompt, local = rng.randrange(512, 32768), 128 * rng.randrange(3)
    matched = 256 * rng.randrange(1, max(2, (prompt - local) // 256))
    backend = {s.BACKEND: "lmcache-mp/resp", s.SERVER_ADDRESS: "10.0.0.7", s.SERVER_PORT: 6379}
    parts = {name: rng.expovariate(20.0) for name in s.TIME_PARTS}

    def span(
        name: str, span_id: bytes, parent: bytes, attributes: dict[str, Any], kind: int = 3, seconds: float = 0.05
    ) -> None:
        end = now_ns - rng.randrange(10**9)
        made = scope.spans.add(
            name=name, trace_id=trace, span_id=span_id, parent_span_id=parent, kind=kind,
            start_time_unix_nano=end - int(seconds * 1e9), end_time_unix_nano=end,
        )  # fmt: skip
        _set(made, attributes)

    span(s.SPAN_LOOKUP, rng.randbytes(8), root, {**backend, s.TOKENS: matched, s.POLLS: rng.randrange(1, 60)})
    fetch = {
        **backend, s.TOKENS: matched, s.ATTEMPT: 1, s.BLOCKS: matched // 128, s.BYTES: matched * 2048,
        s.INFLIGHT: rng.randrange(1, 9), s.NETWORK_RTT: rng.expovariate(3000.0), s.OUTCOME: "ok",
    }  # fmt: skip
    span(s.SPAN_LOAD, rng.randbytes(8), load_parent, {s.RANK: 0, s.OUTCOME: "ok", s.BYTES: matched * 2048})
    for _ in range(reads):
        operation = {s.OPERATION: "GET", s.KEYS: 1, s.BYTES: 524288, s.OUTCOME: "ok"}
        span(s.SPAN_READ, rng.randbytes(8), load_parent, operation, seconds=0.001)
    span(s.SPAN_FETCH, load_parent, root, fetch)
    span(
        s.SPAN_REQUEST, root, b"",
        {
            s.REQUEST_ID: external, s.INTERNAL_ID: f"{external}-{rng.getrandbits(32):08x}",
            s.REQUEST_MODEL: "llama-3-8b",
            s.ENGINE_ID: "10.0.0.1:8000/0", s.BACKEND: "lmcache-mp/resp", s.INPUT_TOKENS: prompt, s.TOKENS_LOCAL: local,
            s.TOKENS_MATCHED: matched, s.TOKENS_LOADED: matched, s.TOKENS_COMPUTED: prompt - local - matched,
            s.TTFT: sum(parts.values()) + rng.expovariate(500.0), **parts, s.EXPOSED_WAIT: rng.expovariate(20.0),
            s.DECISION: "remote", s.DECISION_REASON: "mode on", s.DIRECTIVE_ID: "d-12", s.RUNNING: rng.randrange(64),
            s.WAITING: rng.randrange(16), s.ABORTED: False,
        },
        kind=1, seconds=0.4,
    )  # fmt: skip
    decode = {s.REQUEST_ID: external, s.OUTPUT_TOKENS: rng.randrange(1, 2000), s.TPOT: rng.expovariate(50.0)}
    span(s.SPAN_DECODE, rng.randbytes(8), root, decode, kind=1)
    span(
        s.SPAN_VLLM_REQUEST, rng.randbytes(8), root,
        {
            s.VLLM_TTFT: sum(parts.values()) + 0.001, s.VLLM_E2E: rng.expovariate(0.5),
            s.VLLM_QUEUE: rng.expovariate(20.0),
            "gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": rng.randrange(1, 2000),
            s.VLLM_PREFILL: rng.expovariate(20.0), "gen_ai.latency.time_in_model_decode": rng.expovariate(0.5),
            "gen_ai.latency.time_in_model_inference": rng.expovariate(0.5), s.REQUEST_ID: external,
            "gen_ai.request.top_p": 0.95, "gen_ai.request.max_tokens": 2048, "gen_ai.request.temperature": 0.7,
            "gen_ai.request.n": 1,
        },
        kind=2,
    )  # fmt: skip


def _set(owner: Any, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        target = owner.attributes.add(key=key).value
        if isinstance(value, bool):
            target.bool_value = value
        elif isinstance(value, int):
            target.int_value = value
        elif isinstance(value, float):
            target.double_value = value
        else:
            target.string_value = value


def _json(message: ExportTraceServiceRequest) -> bytes:
    tree = MessageToDict(message, use_integers_for_enums=True)
    for owner in tree["resourceSpans"]:
        for scope in owner["scopeSpans"]:
            for span in scope["spans"]:
                for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                    span[key] = base64.b64decode(span[key]).hex()
    return json.dumps(tree, separators=(",", ":")).encode()
