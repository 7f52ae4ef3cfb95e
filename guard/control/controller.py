"""The controller of one engine and backend: what it was, what is known, what time it is -> what to ask of the hook.

    open ──(some lose, reads queue or fail)──▶ limited ──▶ open
     │ ▲                                          │
     │ └────────── two trickle reads paid ◀── half-open ◀── healed, or time for a try ── bypass
     └──────── broken, stalled, or nothing pays ────────────────────────────────────────▶┘

The gate in the hook compares every request by the coefficients sent here; the states are for what holds for all of
them. Into bypass: at once when reads fail or are stuck (progress decides, not liveness), after `PERSIST` seconds when
no class gains by more than the margin. Out of it: RTT fell, another engine's reads pay again, what was stuck moves, or,
where nobody can say, after a backoff whose length is what the last try cost over the budget of lost seconds.
Then a trickle of tagged reads; two that paid open, one that did not goes back. Entering and leaving have different
thresholds, a dwell time and a persistence, so noise moves nothing (docs/control.md).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from guard.control import limit as limits
from guard.control.projection import coefficients, costs_of, held, min_tokens, project, saved_seconds
from guard.control.reading import apart, expected, slowdown, tells
from guard.control.shapes import (
    ALL,
    BYPASS,
    HALF_OPEN,
    LIMITED,
    OPEN,
    Coefficients,
    Evidence,
    Plan,
    Projection,
    Read,
    State,
)
from guard.costs import Costs
from guard.wire import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Constants of the controller. Ratios of projected remote to recompute; times in seconds."""

    enter: float = 1.15  # no class below it: nothing pays
    leave: float = 0.95  # some class below it: reads pay again
    persist: float = 1.0
    dwell: float = 2.0
    stalled: float = 2.0  # oldest read over what recomputing takes, or over its own projection if that is longer
    failures: int = 3
    failure_window: float = 10.0
    reads: int = 5  # of which the median counts
    read_age: float = 10.0
    fallen: float = 0.5  # RTT below this share of what it was when reads were stopped: the link has healed
    noise: float = 0.15  # of log(actual / projected)
    goods: int = 2
    trickle_seconds: float = 0.5
    backoff: float = 2.0
    backoff_limit: float = 30.0
    stuck: float = 10.0  # a read in flight for longer has no end that could be waited for
    stuck_backoff: float = 45.0  # after a try that did not end: each costs a request its patience, or its life
    lost_seconds_per_minute: float = 6.0  # budget of trickle and hold-out together
    holdout: float = 1 / 64  # largest share that is held out
    explore_seconds: float = 20.0  # least time between trickle reads of classes that are projected to lose


DEFAULT: Final = Tuning()
HEALED: Final = "healed"
PROGRESS: Final = "progress"
TRY: Final = "try"
UNREACHABLE: Final = 1e9
"""Stands for the RTT, seconds, of a store that does not answer: any that does is a healed one."""

_KEPT: Final = 16
_LONGEST_STEPS: Final = 5.0


def decide(state: State, evidence: Evidence, now: float, tuning: Tuning = DEFAULT) -> tuple[State, Plan]:
    """One step. Without models (a new deployment) only failures and stalls act; nothing is guessed."""
    state = _taken_in(state, evidence, now, tuning)
    plain = coefficients(evidence)
    if plain is None:
        return _step(state, evidence, now, tuning, Coefficients(), None, Projection(), Projection())
    costs = idle = costs_of(plain)
    telling = [read for read in state.reads if tells(read, evidence, idle, tuning.noise)]
    pace = slowdown(telling[-tuning.reads :], evidence, idle, tuning.noise)
    sure = slowdown(apart(telling, tuning.reads), evidence, idle, tuning.noise)
    wanted = plain
    if pace != 1.0:
        wanted = coefficients(evidence, pace) or plain
        costs = costs_of(wanted)
    state = replace(state, pace=pace)
    projection = certain = project(evidence, costs)
    if sure < pace:  # it may only calm: that the latest reads were fine counts, too
        certain = project(evidence, costs_of(coefficients(evidence, sure) or plain))
    return _step(state, evidence, now, tuning, wanted, costs, projection, certain, idle)


def _step(
    state: State, evidence: Evidence, now: float, tuning: Tuning, wanted: Coefficients, costs: Costs | None,
    projection: Projection, certain: Projection, idle: Costs | None = None,
) -> tuple[State, Plan]:  # fmt: skip
    """`certain` counts a burst of reads once; `idle` are the costs by models and RTT alone, without the last reads."""
    before = state.name
    if state.name in (OPEN, LIMITED):
        state = _while_open(state, evidence, now, tuning, costs, certain)
    elif state.name == BYPASS:
        state = _while_bypass(state, evidence, now, tuning, idle)
    else:
        state = _while_half_open(state, evidence, now, tuning, costs, idle)
    if state.name in (OPEN, LIMITED):
        state = _limited(state, evidence, now, tuning, costs, projection)
    sent = held(state.sent, wanted) if state.name == before else wanted
    state = replace(state, sent=sent)
    return state, Plan(
        state=state.name,
        reason=state.reason,
        reads=_reads(state, evidence, tuning, costs, projection, certain),
        coefficients=sent,
        projection=projection,
        evidence=_told(state, evidence, projection),
        changed=state.name != before,
    )


def _taken_in(state: State, evidence: Evidence, now: float, tuning: Tuning) -> State:
    """Keeps the latest reads and failures. While nothing is read, what was seen last stays what is known."""
    reads, failures = state.reads, state.failures
    new = tuple(
        read if read.rtt is not None else replace(read, rtt=evidence.rtt)
        for read in evidence.reads
        if read.ok and read.seconds > 0.0 and read.at - read.seconds >= state.fresh
    )
    if new:
        reads = (*reads, *new)[-_KEPT:]
    if state.name in (OPEN, LIMITED):
        reads = tuple(read for read in reads if now - read.at <= tuning.read_age)
    failed = tuple(read.at for read in evidence.reads if not read.ok)
    failures = tuple(at for at in (*failures, *failed) if now - at <= tuning.failure_window)[-_KEPT:]
    return state if (reads, failures) == (state.reads, state.failures) else replace(
        state, reads=reads, failures=failures
    )  # fmt: skip


def _against(state: State, evidence: Evidence, now: float, tuning: Tuning, costs: Costs | None) -> str:
    """What speaks against reading at once: `failures` or `stalled`; empty when nothing does."""
    last_good = max((read.at for read in state.reads), default=-math.inf)
    if sum(at > last_good for at in state.failures) >= tuning.failures:
        return "failures"
    if evidence.reachable is False and (evidence.oldest_age > 1.0 or state.failures):
        return "unreachable"
    if evidence.oldest_age > 0.0 and costs is not None:
        cell = evidence.cells[ALL]
        recompute = costs.prefill(cell.reference_tokens, cell.reference_tokens)
        size = cell.reference_matched * costs.bytes_per_token
        late = max(recompute, costs.read_seconds(size, evidence.inflight_bytes) * costs.fetch_tail)
        if evidence.oldest_age > tuning.stalled * late + _steps(state) and not any(
            read.at - read.seconds > now - evidence.oldest_age for read in state.reads
        ):
            return "stalled"
    return ""


def _while_open(
    state: State, evidence: Evidence, now: float, tuning: Tuning, costs: Costs | None, projection: Projection
) -> State:
    against = _against(state, evidence, now, tuning, costs)
    if against:
        return _moved(state, BYPASS, against, now, tuning, evidence.rtt)
    doubt = costs.doubt if costs is not None else 1.0
    losing = "sla" if projection.sla else "projected" if projection.best > tuning.enter * doubt else ""
    if not losing:
        return state if state.against_since is None else replace(state, against_since=None)
    since = now if state.against_since is None else state.against_since
    if now - since >= tuning.persist and now - state.since >= tuning.dwell:
        return _moved(state, BYPASS, losing, now, tuning, evidence.rtt)
    return replace(state, against_since=since)


def _while_bypass(state: State, evidence: Evidence, now: float, tuning: Tuning, idle: Costs | None) -> State:
    """Looks for healing. `idle` are the costs by RTT and models alone: what made reads slow may be gone unseen."""
    if evidence.reachable is False:
        return state if state.rtt == UNREACHABLE else replace(state, rtt=UNREACHABLE)
    if any(_released(read, state) for read in evidence.reads):
        state = replace(state, goods=state.goods + 1)  # kept: the news may come before anything may follow from it
    if now - state.since < tuning.dwell / 2.0:
        return state
    if _fallen(state, evidence, tuning) or evidence.peers_healed > state.since:
        return _moved(state, HALF_OPEN, HEALED, now, tuning)
    rtt, floor = evidence.rtt, evidence.cells[ALL].rtt_floor if ALL in evidence.cells else None
    # Where RTT itself makes reads lose, or is raised and may be what does, it is waited for: a try now and then only,
    # and that a slow read has ended at last says nothing.
    raised = rtt is not None and floor is not None and rtt > floor / tuning.fallen
    losing = rtt is not None and idle is not None and project(evidence, idle).best > tuning.leave
    waited = state.reason == "stalled" or state.lost > 0.0
    if waited and evidence.oldest_age == 0.0 and state.goods > 0 and not (raised or losing):
        return _moved(state, HALF_OPEN, PROGRESS, now, tuning)
    patience = tuning.backoff_limit if raised or losing else state.backoff
    if now - state.since >= patience:
        return _moved(state, HALF_OPEN, TRY, now, tuning)
    return replace(state, rtt=rtt) if rtt is not None and rtt > (state.rtt or 0.0) else state  # it may rise after


def _fallen(state: State, evidence: Evidence, tuning: Tuning) -> bool:
    """RTT is well below what it was when reads were stopped: the link has healed."""
    return evidence.rtt is not None and state.rtt is not None and evidence.rtt < tuning.fallen * state.rtt


def _released(read: Read, state: State) -> bool:
    """A read that began before the state did, so was stuck, has ended well: the link moves again."""
    return read.ok and read.at - read.seconds < state.since


def _while_half_open(
    state: State, evidence: Evidence, now: float, tuning: Tuning, costs: Costs | None, idle: Costs | None
) -> State:
    if state.reason != HEALED and _fallen(state, evidence, tuning):
        state = replace(state, since=now, reason=HEALED, goods=0, lost=0.0)  # tries under way are of the link that was
    elif state.reason != HEALED and evidence.peers_healed > state.since:
        state = replace(state, reason=HEALED, lost=0.0)
    elif state.reason == TRY and any(_released(read, state) for read in evidence.reads):
        state = replace(state, reason=PROGRESS, lost=0.0)
    tried = [read for read in evidence.reads if read.tagged and read.at - read.seconds >= state.since]
    lost, wasted, goods = 0.0, 0.0, state.goods
    for read in tried:
        saved = saved_seconds(read, costs, evidence.waiting)
        # What may have been a wait for the engine is taken for one only where RTT says that the link healed.
        if read.ok and (read.seconds <= saved or (read.least <= saved and _fallen(state, evidence, tuning))):
            goods += 1
        elif (read.ok and read.least <= saved) or _as_projected(read, evidence, idle, tuning):
            # One of few tokens may not pay on the best of links.
            wasted = max(wasted, read.seconds - saved)
        else:
            lost = max(lost, read.least - saved if read.ok else read.seconds)
    age = evidence.oldest_age
    if not lost and age > 0.0 and not any(read.at >= state.since for read in state.reads):
        cell = evidence.cells.get(ALL)
        tokens = cell.reference_tokens if cell is not None else 0.0
        late = max(tuning.stalled * (costs.prefill(tokens, tokens) if costs is not None else 1.0), 0.5)
        late += _steps(state)
        # What has not ended is a try, or, older than that, what keeps the tries waiting.
        lost = age if age > late and (now - age >= state.since or now - state.since > late + 3.0) else 0.0
    if lost or evidence.reachable is False:
        return _moved(replace(state, lost=lost), BYPASS, "trickle", now, tuning, evidence.rtt)
    if goods >= (1 if state.reason in (HEALED, PROGRESS) else tuning.goods):
        # What was seen before the link healed is no evidence any more.
        fresh = tuple(read for read in state.reads if read.at - read.seconds >= state.since)
        return _moved(replace(state, reads=fresh, failures=(), fresh=state.since), OPEN, HEALED, now, tuning)
    if wasted:  # no news, but not for nothing: the next try waits as after a bad one
        state = replace(state, lost=max(state.lost, wasted))
        state = replace(state, backoff=_longer(state, tuning))
    return state if goods == state.goods else replace(state, goods=goods)


def _steps(state: State) -> float:
    """How long an end of a read may wait to be seen, by the last ones: a busy engine looks once a step."""
    return min(max((read.waited for read in state.reads[-3:]), default=0.0), _LONGEST_STEPS)


def _as_projected(read: Read, evidence: Evidence, idle: Costs | None, tuning: Tuning) -> bool:
    """Whether a read took what models and RTT say, and reads of the usual size pay by them: it is none against them."""
    if not read.ok or idle is None:
        return False
    usual = expected(read, evidence, idle) * max(idle.fetch_tail, math.exp(tuning.noise))
    return read.least <= usual and project(evidence, idle).best <= tuning.leave


def _moved(state: State, name: str, reason: str, now: float, tuning: Tuning, rtt: float | None = None) -> State:
    """Another state."""
    backoff = state.backoff
    if name == BYPASS:
        backoff = _longer(state, tuning) if state.name == HALF_OPEN else tuning.backoff
        if state.lost >= tuning.stuck:
            backoff = tuning.stuck_backoff
    return replace(
        state, name=name, since=now, reason=reason, against_since=None, goods=0, backoff=backoff,
        lost=state.lost if name == BYPASS else 0.0, rtt=rtt if name == BYPASS else state.rtt,
        share=0.5 if state.name == HALF_OPEN and name == OPEN else state.share, raised=now,
    )  # fmt: skip


def _longer(state: State, tuning: Tuning) -> float:
    """Backoff doubles with every try that did not pay, up to what its loss costs of the budget."""
    allowed = state.lost / (tuning.lost_seconds_per_minute / 60.0)
    longest = min(max(allowed, 2.0 * tuning.backoff), tuning.backoff_limit)
    return min(max(2.0 * state.backoff, tuning.backoff), longest)


def _limited(
    state: State, evidence: Evidence, now: float, tuning: Tuning, costs: Costs | None, projection: Projection
) -> State:
    """The gentle actuators: cap on reads in flight, share of traffic; says what holds requests back."""
    limit, baseline, share, raised = state.limit, state.baseline, state.share, state.raised
    if costs is not None:
        for read in evidence.reads:
            usual = costs.read_seconds(read.bytes) / state.pace
            if read.ok and usual > 0.0:
                actual = read.seconds / usual
                baseline = limits.baseline_after(baseline, actual, read.inflight)
                limit = limits.limit_after(limit, baseline, actual, read.inflight)
    failed = sum(not read.ok for read in evidence.reads)
    if failed:
        share, raised = max(share / 2.0, 0.1), now
    elif share < 1.0 and now - raised >= 1.0:
        share, raised = min(2.0 * share, 1.0), now
    held_back = (
        "share" if share < 1.0
        else "inflight" if limit is not None and evidence.inflight >= limit / 2.0
        else "projected" if projection.losing_share > 0.05
        else ""
    )  # fmt: skip
    name, reason, since = state.name, state.reason, state.since
    waits = now - since < tuning.dwell
    if held_back and name == OPEN and not waits:
        name, reason, since = LIMITED, held_back, now
    elif not held_back and name == LIMITED and not waits:
        name, reason, since = OPEN, "", now
    return replace(
        state, name=name, reason=reason, since=since, limit=limit, baseline=baseline, share=share, raised=raised
    )


def _reads(
    state: State, evidence: Evidence, tuning: Tuning, costs: Costs | None, projection: Projection, certain: Projection
) -> Reads:
    if state.name == BYPASS:
        return Reads(share=0.0)
    if state.name == HALF_OPEN:
        permitted = evidence.max_inflight != 0  # a try is a read, too: those of many engines must not be a burst
        gap = state.backoff if state.lost > 0.0 else tuning.trickle_seconds
        return Reads(share=0.0, trickle_seconds=gap if permitted else None)
    cap = None if state.limit is None else max(1, int(_step_down(state.limit**2) ** 0.5))
    if evidence.max_inflight is not None:
        cap = evidence.max_inflight if cap is None else min(cap, evidence.max_inflight)
    members = max(evidence.members, 1)  # engines of one backend share the budget of trials
    budget = tuning.lost_seconds_per_minute / 60.0 / members
    least = min_tokens(evidence, costs) if costs is not None else 0
    holdout, explore = 0.0, tuning.explore_seconds
    if costs is not None and projection.remote is not None and projection.recompute is not None:
        explore *= members  # without models nothing is projected to lose: an engine that joins changes nothing
        rate = sum(evidence.mix.values())
        loss = rate * max(projection.gain, 1e-3)
        holdout = _step_down(min(tuning.holdout, budget / loss) if loss > 0.0 else tuning.holdout)
        if projection.losing_share > 0.0:
            explore = max(explore, (projection.remote - projection.recompute) / budget)
    explore = min(1.0 / _step_down(1.0 / explore), 3600.0)
    if certain.losing_share < projection.losing_share:
        explore = tuning.trickle_seconds  # one slow burst keeps others out; whether it was more is asked at once
    return Reads(max_inflight=cap, min_tokens=least, share=state.share, holdout=holdout, trickle_seconds=explore)


def _step_down(value: float) -> float:
    """The power of two at or below `value`: what is sent must not change with every read."""
    return 2.0 ** math.floor(math.log2(value))


def _told(state: State, evidence: Evidence, projection: Projection) -> dict[str, Any]:
    return {
        "pace": round(state.pace, 3),
        "rtt": evidence.rtt,
        "reachable": evidence.reachable,
        "inflight": evidence.inflight,
        "oldest_age": round(evidence.oldest_age, 3),
        "failures": len(state.failures),
        "reads": len(state.reads),
        "best": round(projection.best, 3),
        "gain": round(projection.gain, 6),
        "remote": projection.remote,
        "recompute": projection.recompute,
        "attainable": projection.attainable,
        "waiting": round(evidence.waiting, 2),
    }
