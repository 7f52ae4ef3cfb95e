"""What the road not taken is projected to have cost one request."""

import math
from typing import Any

from guard import semconv as s
from guard.estimate.shapes import Cell, Figure
from guard.wire import RequestRecord

_Z = 1.959964


def other_road(record: RequestRecord, cell: Cell | None) -> dict[str, Any]:
    """The other choice and its projected TTFT with interval (noise of one request), or why it cannot be projected.

    A request that read remotely could have recomputed; one that was refused could have read. Times in seconds.
    """
    if record.ttft is None or record.handoff:
        return _nothing("", "no TTFT, or a hand-off: there was no choice")
    if record.decision == s.DECISION_REMOTE and record.tokens_loaded > 0:
        return _recompute(record, cell)
    if record.decision in (s.DECISION_DECLINE, s.DECISION_SKIP):
        return _remote(record, cell)
    return _nothing("", "nothing was found remotely: there was no choice")


def _recompute(record: RequestRecord, cell: Cell | None) -> dict[str, Any]:
    if cell is None or cell.prefill is None or cell.saved.source != "measured":
        return _nothing("recompute", "insufficient-data: no request of this size was computed in full")
    model = cell.prefill
    full = model.seconds(record.prompt_tokens, record.prompt_tokens - record.tokens_local, record.running)
    # The waits stay as they were; lookup, slot and fetch go.
    rest = record.intake + record.queue + record.resume
    return _told("recompute", record.ttft or 0.0, rest, full, model.spread, cell, model.n)


def _remote(record: RequestRecord, cell: Cell | None) -> dict[str, Any]:
    if cell is None or cell.fetch is None or cell.lookup is None or cell.prefill is None:
        return _nothing("remote", "insufficient-data: too few reads of this backend")
    known = record.tokens_matched > 0
    matched = record.tokens_matched if known else min(cell.reference_matched, record.prompt_tokens - 1.0)
    rtt = record.rtt if record.rtt is not None else cell.rtt_now
    size = matched * cell.bytes_per_token
    read = cell.fetch.seconds(rtt or 0.0, size)
    if record.decision == s.DECISION_SKIP:
        local = record.tokens_local * cell.bytes_per_token if cell.lookup.sends_local else 0.0
        read += cell.lookup.seconds(rtt or 0.0, size + local)
    full = record.prompt_tokens - record.tokens_local
    rest = cell.prefill.seconds(record.prompt_tokens, max(full - matched, 1.0), record.running)
    waits = record.intake + record.queue + record.resume + record.lookup + record.slot
    spread = max(cell.fetch.spread, cell.prefill.spread)
    told = _told("remote", record.ttft or 0.0, waits, read + rest, spread, cell, cell.fetch.n)
    if not known:
        told["assumed_matched_tokens"] = matched
    return told


def _told(choice: str, actual: float, fixed: float, moving: float, spread: float, cell: Cell, n: int) -> dict[str, Any]:
    figure = Figure(
        value=fixed + moving, low=fixed + moving * math.exp(-_Z * spread), high=fixed + moving * math.exp(_Z * spread),
        n=n, source="projected",
    )  # fmt: skip
    return {
        "choice": choice,
        "ttft_seconds": {name: getattr(figure, name) for name in ("value", "low", "high", "n", "source", "reason")},
        "difference_seconds": fixed + moving - actual,
        "from_pool": cell.pooled,
    }


def _nothing(choice: str, reason: str) -> dict[str, Any]:
    empty = dict.fromkeys(("value", "low", "high"))
    return {
        "choice": choice, "difference_seconds": None, "from_pool": False,
        "ttft_seconds": {**empty, "n": 0, "source": "projected", "reason": reason},
    }  # fmt: skip
