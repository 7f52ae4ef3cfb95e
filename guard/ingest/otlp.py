"""The receiving side of OTLP/HTTP 1.10 for traces: body in, spans and an account out.

Protobuf and JSON, gzip or deflate or plain, within limits. A broken request raises; a broken span is rejected with a
reason and the rest is kept (partial success); a span whose name is none of ours is counted as ignored.
"""

from typing import Final

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from guard.errors import WireError
from guard.ingest import fields, otlp_json, protobuf
from guard.ingest.batch import Batch
from guard.ingest.body import Limits, unpack

__all__ = ["JSON", "PROTOBUF", "Batch", "Limits", "accepts", "decode", "encode_response"]

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_READERS: Final = {PROTOBUF: protobuf.decode, JSON: otlp_json.decode}


def decode(
    body: bytes,
    *,
    content_type: str,
    content_encoding: str | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    now_ns: int | None = None,
) -> Batch:
    """Decodes one `POST /v1/traces`.

    With `now_ns`, spans whose times are further than `limits.max_skew_seconds` from it are rejected; without it only
    times outside 2020-2100 are.

    Raises:
        TooLargeError: the body is larger than the limits, as sent or unpacked (413).
        WireError: content type or encoding is not known (415), or the body is broken (400).
    """
    reader = _READERS.get(media_type(content_type))
    if reader is None:
        raise WireError(f"content type {content_type[:60]!r} is not accepted: send {PROTOBUF} or {JSON}")
    earliest_ns, latest_ns = fields.EARLIEST_NS, fields.LATEST_NS
    if now_ns is not None:
        skew_ns = int(limits.max_skew_seconds * 1e9)
        earliest_ns, latest_ns = now_ns - skew_ns, now_ns + skew_ns
    batch = Batch()
    reader(unpack(body, content_encoding, limits), batch, earliest_ns, latest_ns)
    return batch


def accepts(content_type: str) -> bool:
    """Whether `decode` reads this content type."""
    return media_type(content_type) in _READERS


def media_type(content_type: str) -> str:
    """The media type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def encode_response(rejected: int = 0, message: str = "", content_type: str = PROTOBUF) -> bytes:
    """The `ExportTraceServiceResponse`, in the encoding of the request; partial success only where there is one."""
    if media_type(content_type) == JSON:
        if not rejected and not message:
            return b"{}"
        return msgspec.json.encode({"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": message}})
    response = ExportTraceServiceResponse()
    if rejected or message:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = message
    return response.SerializeToString()
