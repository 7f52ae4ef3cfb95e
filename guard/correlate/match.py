"""Finds the request of a span that names a request id but has no parent among our spans.

That is vLLM's `llm_request` where the caller sent no trace context. The children of a request with n > 1 share the
external id, and a client may use an id twice; so all spans and requests of one id are looked at together, and the
nearest in time are paired. The pairing is a function of the two sets: the order of arrival does not matter.
"""

from collections.abc import Sequence
from typing import Any, Final

from guard import semconv as s
from guard.correlate.pending import Pending
from guard.wire import Span

TOLERANCE_SECONDS: Final = 5.0
"""A span further than this from a request's own times is not its span (the clocks are those of one host or pod)."""


def pair(requests: Sequence[Pending], spans: Sequence[Span]) -> None:
    """Gives each request its nearest span of each name.

    A request that has a span by parent keeps that and takes no other.
    """
    options: list[tuple[float, str, str, Pending, Span]] = []
    before = [(request.vllm_loose, request.decode_loose) for request in requests]
    for request in requests:
        request.vllm_loose = request.decode_loose = None
        for span in spans:
            if (request.vllm if span.name == s.SPAN_VLLM_REQUEST else request.decode) is None:
                away = _distance(request, span)
                if away <= TOLERANCE_SECONDS:
                    options.append((away, request.root, span.span_id, request, span))
    if len(options) > 1:
        options.sort(key=lambda option: option[:3])
    found: set[str] = set()
    for _, _, span_id, request, span in options:
        if span_id in found:
            continue
        if span.name == s.SPAN_VLLM_REQUEST:
            if request.vllm_loose is not None:
                continue
            request.vllm_loose = span
        else:
            if request.decode_loose is not None:
                continue
            request.decode_loose = span
        found.add(span_id)
    for request, (vllm, decode) in zip(requests, before, strict=True):
        request.dirty = request.dirty or request.vllm_loose is not vllm or request.decode_loose is not decode


def _distance(request: Pending, span: Span) -> float:
    """How far the span's times are from the request's, seconds."""
    record = request.record
    if record is None:
        return TOLERANCE_SECONDS * 2
    ttft = record.ttft or 0.0
    if span.name == s.SPAN_VLLM_REQUEST:
        told: Any = span.attributes.get(s.VLLM_TTFT, ttft)
        return abs(span.start_ns - record.arrival_ns) / 1e9 + abs(float(told) - ttft)
    return abs((span.start_ns - record.arrival_ns) / 1e9 - ttft)
