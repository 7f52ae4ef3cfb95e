"""W3C trace context, as far as the hook needs it (https://www.w3.org/TR/trace-context/)."""

import re
from typing import Final, NamedTuple

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """The caller's span: ids as numbers, the flags as they came."""

    trace_id: int
    span_id: int
    flags: str

    @property
    def sampled(self) -> bool:
        """Whether the caller records this trace."""
        return bool(int(self.flags, 16) & 1)

    def child(self, span_id: int) -> str:
        """The header that names one of our spans as the parent; trace id and flags are kept."""
        return f"00-{self.trace_id:032x}-{span_id:016x}-{self.flags}"


def parse(header: object) -> TraceContext | None:
    """Reads a `traceparent` header; None where it is absent or broken."""
    if not isinstance(header, str):
        return None
    match = _FORM.fullmatch(header.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id = int(match[2], 16)
    span_id = int(match[3], 16)
    return TraceContext(trace_id, span_id, match[4]) if trace_id and span_id else None
