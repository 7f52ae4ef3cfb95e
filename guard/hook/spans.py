"""Ids and spans: what every record of the hook is made of. Standard library only."""

import random
from typing import Final, Protocol

from guard import semconv
from guard.wire import AttributeValue, Span

CLIENT: Final = 3
"""OTLP's SpanKind of a call to somebody else."""


def new_rng() -> random.Random:
    """A source of span ids, seeded by the system; ids are no secrets."""
    return random.Random()  # noqa: S311


def new_id(bits: int, rng: random.Random) -> int:
    """A random id that is not 0, which OpenTelemetry forbids."""
    return rng.getrandbits(bits) or 1


def hex_id(value: int, digits: int) -> str:
    """An id as lower-case hex; 0 means none."""
    return f"{value:0{digits}x}" if value else ""


class Traced(Protocol):
    """Whatever a span is made for: a trace, whether it is sampled, and wall minus monotonic time in ns."""

    trace_id: int
    sampled: bool
    anchor: int


def make_span(
    owner: Traced,
    name: str,
    span_id: int,
    parent_id: int,
    start: int,
    end: int,
    attributes: dict[str, AttributeValue],
    kind: int = 1,
) -> Span:
    """A span of the owner's trace; an end before the start is moved to the start."""
    if not owner.sampled:
        attributes[semconv.SAMPLED] = False
    return Span(
        name=name,
        trace_id=hex_id(owner.trace_id, 32),
        span_id=hex_id(span_id, 16),
        parent_id=hex_id(parent_id, 16),
        start_ns=start + owner.anchor,
        end_ns=max(start, end) + owner.anchor,
        attributes=attributes,
        kind=kind,
    )


def seconds(nanoseconds: int) -> float:
    """A duration in seconds, never negative."""
    return max(0, nanoseconds) / 1e9
