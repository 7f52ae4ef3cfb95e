"""Simulated requests as the joined rows of `guard.wire`, so that estimation and control learn as in production.

The seven parts of TTFT are cut where the hook cuts them (guard.hook.records).
"""

from typing import Final, NamedTuple

from guard.classes import class_of
from guard.connectors import LOAD_SYNC
from guard.semconv import OUTCOME_FAILED, OUTCOME_OK
from guard.simulate.job import Job
from guard.simulate.results import decision_of
from guard.simulate.scenario import Scenario
from guard.wire import FetchRecord, RequestRecord

MODEL: Final = "simulated/model"
ADDRESS: Final = "store.simulated"


class Parts(NamedTuple):
    """The parts of TTFT after the intake, seconds."""

    queue: float
    lookup: float
    slot: float
    fetch: float
    resume: float
    prefill: float


def engine_id(number: int) -> str:
    """The id of a simulated engine."""
    return f"sim-{number}:8000/0"


def backend(scenario: Scenario) -> str:
    """The label of the simulated backend."""
    return f"{scenario.connector.kind}/simulated"


def parts_of(job: Job, now: float) -> Parts:
    """Where the time of a request went, up to `now`."""
    scheduled = job.scheduled or now
    alloc = job.alloc or scheduled
    if not job.lookup_start:
        return Parts(alloc - job.seen, 0.0, 0.0, 0.0, 0.0, max(0.0, now - scheduled))
    end = job.lookup_end or now
    queue, lookup, slot = job.lookup_start - job.seen, end - job.lookup_start, max(0.0, alloc - end)
    usable = job.usable if job.usable and not job.gave_up else alloc
    fetch = (job.fetch_end or now) - job.fetch_start if job.fetch_start and not job.gave_up else 0.0
    return Parts(queue, lookup, slot, fetch, max(0.0, scheduled - usable), max(0.0, now - max(scheduled, usable)))


def record_of(job: Job, scenario: Scenario, now: float, *, simulated: bool = False) -> RequestRecord:
    """The row of a request at its first token, or at its abort; clock 0 is Unix time 0."""
    number = f"{job.engine}-{job.number}"
    parts = parts_of(job, now)
    decision, reason = decision_of(job)
    prompt = job.prompt.tokens
    return RequestRecord(
        internal_id=number, request_id=number, trace_id=number, span_id=number, engine_id=engine_id(job.engine),
        model=MODEL, backend=backend(scenario), class_=class_of(prompt, job.running), arrival_ns=_ns(job.arrival),
        prompt_tokens=prompt, tokens_local=job.local, tokens_matched=job.matched, tokens_loaded=job.loaded,
        tokens_computed=prompt - job.local - job.loaded, ttft=job.ttft if job.first else None,
        intake=job.seen - job.arrival, queue=parts.queue, lookup=parts.lookup, slot=parts.slot, fetch=parts.fetch,
        resume=parts.resume, prefill=parts.prefill, residual=0.0, exposed_wait=parts.lookup + parts.fetch,
        decision=decision, reason=reason, directive_id=job.directive_id, running=job.running, waiting=job.waiting,
        aborted=not job.first, simulated=simulated, lookup_polls=1 if job.lookup_start else 0,
        lookup_round_trips=_told(job.lookup_trips, scenario) if job.lookup_start else None,
        fetches=_fetches(job, scenario, number),
        rtt=job.rtt or None, rtt_source="tcp" if job.rtt else "", propensity=job.propensity,
    )  # fmt: skip


def _fetches(job: Job, scenario: Scenario, number: str) -> list[FetchRecord]:
    if not job.fetch_end or job.gave_up:
        return []
    ok = job.loaded > 0
    sync = scenario.connector.capability.load == LOAD_SYNC
    return [
        FetchRecord(
            span_id=f"{number}-f", attempt=1, start_ns=_ns(job.fetch_start), seconds=job.fetch_end - job.fetch_start,
            outcome=OUTCOME_OK if ok else OUTCOME_FAILED, tokens=job.matched, bytes=job.fetch_bytes,
            blocks=job.matched // scenario.connector.chunk_tokens, inflight=max(1, job.inflight),
            round_trips=_told(job.fetch_trips, scenario), network_rtt=job.rtt or None,
            batch=f"{job.engine}-{job.batch}" if sync else None,
            error_type=None if ok else "timeout",
        )
    ]  # fmt: skip


def _told(trips: float, scenario: Scenario) -> int | None:
    """Round trips, where the hook could see them."""
    return round(trips) if scenario.connector.capability.reads_in_process else None


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
