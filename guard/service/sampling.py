"""Keeps a share of the traces of an OTLP request, by trace id, and leaves out what its caller did not sample."""

import json
from typing import Any, Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard import semconv
from guard.errors import WireError
from guard.ingest import otlp
from guard.ingest.body import Limits, unpack

_LOW_64: Final = (1 << 64) - 1
_MARK: Final = semconv.SAMPLED.encode()


def keeps(trace_id: int, ratio: float) -> bool:
    """Whether the trace is in the sample, as OpenTelemetry's TraceIdRatioBased sampler decides."""
    return trace_id & _LOW_64 < round(ratio * (1 << 64))


def keeps_all(body: bytes, content_encoding: str, ratio: float) -> bool:
    """Whether the request can go on as it came: every trace is wanted and none says that it is not sampled.

    Raises:
        WireError: the body cannot be unpacked.
    """
    return ratio >= 1.0 and _MARK not in unpack(body, content_encoding, Limits())


def sample(body: bytes, content_type: str, content_encoding: str, ratio: float) -> tuple[bytes, int] | None:
    """The request with the sampled traces only, unpacked, and its number of spans; None when nothing is left.

    Raises:
        WireError: the body is not an OTLP request.
    """
    plain = unpack(body, content_encoding, Limits())
    if otlp.media_type(content_type) == otlp.JSON:
        return _sample_json(plain, ratio)
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(plain)
    except DecodeError as error:
        raise WireError(f"body is not an OTLP trace request: {error}") from None
    spans = 0
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            kept = [
                span
                for span in scope_spans.spans
                if keeps(int.from_bytes(span.trace_id, "big"), ratio)
                and not any(item.key == semconv.SAMPLED and not item.value.bool_value for item in span.attributes)
            ]
            del scope_spans.spans[:]
            scope_spans.spans.extend(kept)
            spans += len(kept)
    return (request.SerializeToString(), spans) if spans else None


def _sample_json(plain: bytes, ratio: float) -> tuple[bytes, int] | None:
    try:
        request: Any = json.loads(plain)
        spans = 0
        for resource_spans in request.get("resourceSpans") or ():
            for scope_spans in resource_spans.get("scopeSpans") or ():
                kept = [
                    span
                    for span in scope_spans.get("spans") or ()
                    if keeps(int(span["traceId"], 16), ratio)
                    and not any(
                        item["key"] == semconv.SAMPLED and not item["value"].get("boolValue", False)
                        for item in span.get("attributes") or ()
                    )
                ]
                scope_spans["spans"] = kept
                spans += len(kept)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"body is not an OTLP trace request in JSON: {type(error).__name__}") from None
    return (json.dumps(request, separators=(",", ":")).encode(), spans) if spans else None
