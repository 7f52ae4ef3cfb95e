"""Requests by their figures, and the cells that `fit` makes of them."""

import pytest

from guard.correlate.frame import frame
from guard.estimate.frames import fit
from guard.wire import FetchRecord, RequestRecord


def make(number=0, *, prompt=2000, local=0, matched=0, loaded=None, lookup=0.0, fetch=0.0, prefill=0.1, queue=0.0,
         slot=0.0, resume=0.0, rtt=None, trips=None, running=2, inflight=1, size=None, batch=None, decision=None,
         failed=False, at=None, e2e=None, engine="e:1/0", **more):  # fmt: skip
    """A record whose TTFT is the sum of its parts."""
    loaded = matched if loaded is None else loaded
    fetches = []
    if fetch > 0.0 or loaded:
        fetches = [
            FetchRecord(
                span_id=f"f{number}", attempt=1, start_ns=0, seconds=fetch, outcome="failed" if failed else "ok",
                bytes=loaded * 131072 if size is None else size, inflight=inflight, round_trips=trips, batch=batch,
            )
        ]  # fmt: skip
    values = {
        "internal_id": f"r{number}", "request_id": f"c{number}", "trace_id": "t", "span_id": f"s{number}",
        "engine_id": engine, "model": "m", "backend": "b", "class_": "k", "prompt_tokens": prompt,
        "arrival_ns": int((number if at is None else at) * 1e9), "tokens_local": local, "tokens_matched": matched,
        "tokens_loaded": loaded, "tokens_computed": max(1, prompt - local - loaded),
        "ttft": lookup + fetch + prefill + queue + slot + resume, "intake": 0.0, "queue": queue, "lookup": lookup,
        "slot": slot, "fetch": fetch, "resume": resume, "prefill": prefill, "residual": 0.0, "exposed_wait": fetch,
        "decision": decision or ("remote" if loaded else "none"), "reason": "", "running": running, "rtt": rtt,
        "fetches": fetches, "vllm_e2e": e2e,
    }  # fmt: skip
    return RequestRecord(**(values | more))


@pytest.fixture(scope="session")
def request_of():
    return make


@pytest.fixture(scope="session")
def pool_of():
    """The pooled cell of records."""

    def pool(records, **more):
        cells = fit(frame(records), **more)
        return next(cell for cell in cells if cell.class_ == "all")

    return pool
