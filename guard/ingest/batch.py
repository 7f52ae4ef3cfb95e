"""What decoding gives: spans by resource, and an account of those that were not taken."""

from dataclasses import dataclass, field

from guard import semconv
from guard.wire import AttributeValue, Span

_MAX_REASONS = 32


@dataclass(slots=True)
class Batch:
    """One decoded OTLP request; `received` = spans in `groups` + `ignored` + `rejected`."""

    groups: list[tuple[dict[str, AttributeValue], list[Span]]] = field(default_factory=list)
    received: int = 0
    ignored: int = 0  # spans whose name is none of ours
    rejected: int = 0  # spans that are broken
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        """How many spans go on to the join."""
        return self.received - self.ignored - self.rejected

    @property
    def message(self) -> str:
        """Why spans were rejected, for the partial-success answer; empty when none was."""
        return "; ".join(f"{reason} ({count} spans)" for reason, count in self.reasons.items())

    def take(self, resource: dict[str, AttributeValue], spans: list[Span]) -> None:
        """Keeps what one resource sent; without spans only where it brings a hook's own counters."""
        if spans or semconv.RECORDS_DROPPED in resource or semconv.HOOK_ERRORS in resource:
            self.groups.append((resource, spans))

    def reject(self, name: str, reason: str) -> None:
        """Counts a broken span."""
        self.rejected += 1
        key = f"{name[:64] or 'span'}: {reason}"
        if key not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            key = "other reasons"
        self.reasons[key] = self.reasons.get(key, 0) + 1
