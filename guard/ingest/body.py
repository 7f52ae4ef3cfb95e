"""Unpacks the body of an HTTP request within bounds: a bomb costs no more memory than the limit."""

import zlib
from dataclasses import dataclass
from typing import Final

from guard.errors import TooLargeError, WireError

_WINDOW_BITS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_MAX_MEMBERS: Final = 64  # every further gzip member copies what is left of the body: a million of them is an attack


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one OTLP request may cost: bytes as sent, bytes unpacked, and how far a clock may be off."""

    max_body: int = 16 << 20
    max_decompressed: int = 64 << 20
    max_skew_seconds: float = 86400.0


def unpack(body: bytes, content_encoding: str | None, limits: Limits) -> bytes:
    """The body without its content encoding (identity, gzip or deflate).

    Raises:
        TooLargeError: it is larger than the limits allow, packed or unpacked.
        WireError: the encoding is not known, or the data are truncated or broken.
    """
    if len(body) > limits.max_body:
        raise TooLargeError(f"body of {len(body)} bytes is larger than {limits.max_body}")
    encoding = (content_encoding or "identity").strip().lower()
    if encoding in ("identity", ""):
        return body
    if encoding not in _WINDOW_BITS:
        raise WireError(f"content encoding {encoding[:40]!r} is not known: use gzip, deflate or identity")
    return _inflate(body, _WINDOW_BITS[encoding], limits.max_decompressed)


def _inflate(body: bytes, window_bits: int, limit: int) -> bytes:
    parts: list[bytes] = []
    size, rest = 0, body
    try:
        while rest and len(parts) < _MAX_MEMBERS:
            unpacker = zlib.decompressobj(window_bits)
            part = unpacker.decompress(rest, limit + 1 - size)
            size += len(part)
            if size > limit:
                raise TooLargeError(f"body unpacks to more than {limit} bytes")
            if not unpacker.eof:
                raise WireError("compressed body is truncated")
            parts.append(part)
            rest = unpacker.unused_data
    except zlib.error as error:
        raise WireError(f"compressed body is broken: {error}") from None
    if rest:
        raise WireError(f"compressed body has more than {_MAX_MEMBERS} members")
    return parts[0] if len(parts) == 1 else b"".join(parts)
