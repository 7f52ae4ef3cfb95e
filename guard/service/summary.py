"""One row per engine and backend of the last requests, for tables that people watch."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from guard import semconv
from guard.correlate.stats import quantile
from guard.wire import RequestRecord


def engines(records: Iterable[RequestRecord], since_ns: int, now_ns: int) -> list[dict[str, Any]]:
    """Rates and quantiles over the records that arrived after `since_ns`. Times in seconds; None: too few to say.

    `hit_share` is the share of requests that loaded tokens from the remote tier; `remote_token_share` that of the
    prompt tokens. Requests without a first token count as aborted only.
    """
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        groups.setdefault((record.engine_id, record.backend), []).append(record)
    return [_row(*key, groups[key], since_ns, now_ns) for key in sorted(groups)]


def _row(engine_id: str, backend: str, records: list[RequestRecord], since_ns: int, now_ns: int) -> dict[str, Any]:
    served = [record for record in records if record.ttft is not None and not record.aborted]
    start_ns = max(since_ns, min(record.arrival_ns for record in records))
    seconds = max((now_ns - start_ns) / 1e9, 1.0)
    ttft = _array(record.ttft for record in served)
    miss = _array(record.miss_latency for record in served if record.fetches)
    rtt = _array(fetch.network_rtt for record in served for fetch in record.fetches)
    prompt = sum(record.prompt_tokens for record in served)
    decisions = {name: sum(record.decision == name for record in served) for name in semconv.DECISIONS}
    return {
        "engine_id": engine_id,
        "backend": backend,
        "n": len(served),
        "aborted": len(records) - len(served),
        "simulated": sum(record.simulated for record in records),
        "requests_per_second": len(records) / seconds,
        "hit_share": sum(record.tokens_loaded > 0 for record in served) / len(served) if served else None,
        "remote_token_share": sum(record.tokens_loaded for record in served) / prompt if prompt else None,
        "decisions": decisions,
        "ttft": {"p50": quantile(ttft, 0.5), "p95": quantile(ttft, 0.95)},
        "miss_latency": {"n": int(miss.size), "p50": quantile(miss, 0.5), "p95": quantile(miss, 0.95)},
        "network_rtt": {"n": int(rtt.size), "p50": quantile(rtt, 0.5)},
    }


def _array(values: Iterable[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([value for value in values if value is not None], dtype=np.float64)
