"""Pages of requests, newest or slowest first; pure.

A cursor names the last row of a page by its place in the order, so that pages neither repeat nor skip a request while
new ones come in and old ones drop out.
"""

import base64
import binascii
import heapq
import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, Literal

from guard.correlate.records import PARTS
from guard.wire import RequestRecord

Order = Literal["latest", "slowest", "miss-latency", "exposed-wait"]
Place = tuple[float, str]
ORDERS: Final[dict[str, Callable[[RequestRecord], float]]] = {
    "latest": lambda record: record.arrival_ns,
    "slowest": lambda record: -1.0 if record.ttft is None else record.ttft,
    "miss-latency": lambda record: record.miss_latency,
    "exposed-wait": lambda record: record.exposed_wait,
}


def page(records: Iterable[RequestRecord], order: Order, limit: int, cursor: str) -> tuple[list[RequestRecord], str]:
    """The `limit` records after `cursor` in `order`, and the cursor of the next page; empty at the end.

    Raises:
        ValueError: the cursor is none of ours, or of another order.
    """
    value = ORDERS[order]

    def place(record: RequestRecord) -> Place:
        return value(record), record.span_id

    if cursor:
        after = _place_of(cursor, order)
        records = (record for record in records if place(record) < after)
    found = heapq.nlargest(limit + 1, records, key=place)
    rows = found[:limit]
    return rows, _cursor(place(rows[-1]), order) if len(found) > limit else ""


def row(record: RequestRecord) -> dict[str, Any]:
    """What a list shows of a request; times in seconds."""
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
        "aborted": record.aborted,
        "simulated": record.simulated,
        "tokens": {
            "prompt": record.prompt_tokens,
            "local": record.tokens_local,
            "remote_matched": record.tokens_matched,
            "remote_loaded": record.tokens_loaded,
            "computed": record.tokens_computed,
            "output": record.output_tokens,
        },
        "ttft_seconds": record.ttft,
        "miss_latency_seconds": record.miss_latency,
        "exposed_wait_seconds": record.exposed_wait,
        "parts": {name: getattr(record, name) for name in PARTS},
        "failed_fetches": sum(fetch.outcome == "failed" for fetch in record.fetches),
        "source": "measured",
    }


def _cursor(place: Place, order: Order) -> str:
    return base64.urlsafe_b64encode(json.dumps([order, *place]).encode()).decode().rstrip("=")


def _place_of(cursor: str, order: Order) -> Place:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        of, value, span_id = json.loads(text)
        if of == order and isinstance(value, int | float) and isinstance(span_id, str):
            return value, span_id
    except (ValueError, TypeError, binascii.Error, RecursionError):
        pass
    raise ValueError("cursor: send next_cursor of the last page, with the same sort")
