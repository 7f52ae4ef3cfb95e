"""The scheduler's side of one guarded connector: asks the gate, keeps the request's leg, sends contexts to workers.

Every method is called by the connector inside a try, before or after the inner connector's own method, and answers at
once. Where a decision was taken it is kept: over re-polls, over preemption. It may go from remote to recompute while
the request does not wait for remote KV yet, or after a failed load; never back.
"""

from collections.abc import Callable
from typing import Any, Final

from guard import gate, semconv
from guard.connectors import LOAD_SYNC
from guard.costs import Costs, Traffic
from guard.gate import Decision
from guard.hook.adapters.base import Adapter
from guard.hook.envelope import ENVELOPE, Context, Envelope, Load, SyncLoads
from guard.hook.requests import Attempt, Backend, Leg, RequestState
from guard.hook.spans import new_id
from guard.hook.table import RequestTable
from guard.pace import Pace
from guard.wire import Directive

NO_MATCH: Final = (0, False)


class SchedulerSide:
    """One guarded connector in the EngineCore process."""

    def __init__(
        self,
        table: RequestTable,
        backend: Backend,
        adapter: Adapter,
        current: Callable[[str], Directive | None],
        *,
        key: int,
        handoff: bool = False,
        boot: str = "",
    ) -> None:
        self.table = table
        self.backend = backend
        self.adapter = adapter
        self._current = current
        self._key = key
        self._handoff = handoff or backend.capability.handoff
        self._boot = boot
        self._loads: list[tuple[RequestState, Leg, Attempt]] = []
        self._built = 0

    def arrived(self, request: Any) -> bool:
        """A request arrived. False: the connector must not be told, since its lookup would start at once."""
        state = self._state(request)
        if not self.adapter.lookup_starts_early(request):
            return True
        leg = self.table.leg(state, self._key, self.backend)
        leg.start = leg.start or self.table.clock()
        self._decide_lookup(state, leg, request, None)
        if leg.skip is not None and not leg.skip.admitted:
            return False
        self._reading(leg, state.prompt_tokens)
        return True

    def before_lookup(self, request: Any, local: int) -> tuple[int, bool] | None:
        """The scheduler asks for remote tokens. None: ask the connector; else the answer."""
        state = self._state(request)
        if not state.first and not state.away:
            self.table.expect(state, state.prompt_tokens - local)
        leg = self.table.leg(state, self._key, self.backend)
        if not state.told and not leg.first_poll:
            leg.first_poll = self.table.clock()
            leg.start = leg.start or leg.first_poll
        if leg.skip is None or (state.load_failed and leg.skip.admitted):
            self._decide_lookup(state, leg, request, local)
        if leg.skip is not None and not leg.skip.admitted:
            if self.adapter.skip(request, local):
                if not state.told:
                    leg.local = local
                    leg.end = leg.end or self.table.clock()
                return NO_MATCH
            leg.skip = Decision(semconv.DECISION_REMOTE, leg.skip.reason)  # cannot be skipped: the load gate refuses
        if not leg.end:
            leg.polls += 1
            self._reading(leg, state.prompt_tokens)
        return None

    def after_lookup(self, request: Any, local: int, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """The connector answered; what vLLM is to be told."""
        tokens, asynchronous = answer
        if tokens is None:
            return answer
        state = self._state(request)
        leg = self.table.leg(state, self._key, self.backend)
        if not leg.end:
            leg.end = self.table.clock()
            leg.round_trips = self.adapter.answered(request, local, tokens)
            self._looked_up(leg, local, tokens)
        if not state.told:
            leg.local = local
            if not state.load_failed:  # else what was loaded in vain would be hidden
                leg.matched = max(0, tokens)
        if tokens <= 0:
            return answer
        leg.asynchronous = asynchronous
        if self._handoff:  # what it matched is a hand-off; a sibling in a MultiConnector may still serve hits
            state.handoff = True
        if leg.load is None or (state.load_failed and leg.load.admitted):
            self._decide_load(state, leg, tokens)
        if leg.load is not None and not leg.load.admitted and self.adapter.may_decline(request):
            self.adapter.declined(request, local)
            return NO_MATCH
        return answer

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Blocks were allocated; `tokens` > 0: this connector loads them."""
        state = self._state(request)
        leg = self.table.leg(state, self._key, self.backend)
        attempt = self.table.allocated(state, leg, blocks, tokens, asynchronous=leg.asynchronous)
        if attempt is not None:
            self._loads.append((state, leg, attempt))

    def stores(self) -> bool:
        """Whether the connector may store in the step that is being built."""
        directive = self._current(self.backend.label)
        return directive is None or directive.stores or directive.mode == semconv.MODE_OBSERVE or self._handoff

    def meta_built(self, output: Any, meta: Any) -> None:
        """A step's metadata is there: new requests are scheduled, their traces and loads go to the workers."""
        if self.backend.capability.load != LOAD_SYNC:  # a step with a synchronous load ends when it has ended
            self.table.pace(self.backend).step(self.table.clock())
        new = output.scheduled_new_reqs
        if not new and not self._loads:
            self.table.running = len(output.num_scheduled_tokens)
            return
        self.table.scheduled([each.req_id for each in new], len(output.num_scheduled_tokens))
        loads, self._loads = self._loads, []
        batch = 0
        if any(not attempt.asynchronous for _, _, attempt in loads):
            batch = new_id(64, self.table.rng)
            self._built = self.table.clock()
        contexts: dict[str, Context] = {}
        for state, leg, attempt in loads:
            if not attempt.asynchronous:
                attempt.batch = batch
            contexts[state.internal_id] = _context(state, leg)
        for each in new:
            found = self.table.get(each.req_id)
            if found is not None and each.req_id not in contexts:
                contexts[each.req_id] = _context(found, found.legs.get(self._key))
        envelope = Envelope(
            tuple(contexts.values()),
            tuple(
                Load(state.internal_id, attempt.span_id, attempt.number, attempt.tokens, attempt.asynchronous)
                for state, _, attempt in loads
            ),
            batch,
        )
        try:
            setattr(meta, ENVELOPE, envelope.plain())
        except AttributeError:  # metadata with __slots__: no times from the workers
            return

    def outputs(self, output: Any, timing: SyncLoads | None) -> None:
        """The workers reported: failed loads first, then those that ended."""
        table = self.table
        failed = getattr(output, "failed_recving", None)
        if failed:
            table.failed(failed, "recv")
        blocks = getattr(output, "invalid_block_ids", None)
        if blocks:
            table.failed_blocks(blocks)
        if timing is not None:
            same = timing.boot == self._boot
            table.loaded_batch(timing.batch, timing.end if same else self._built + timing.end - timing.start)
        if output.finished_recving:
            table.loaded(output.finished_recving)

    def finished(self, request: Any) -> None:
        """A request has ended."""
        self.table.finished(request)
        self.adapter.forget(request.request_id)

    def _state(self, request: Any) -> RequestState:
        state = self.table.get(request.request_id)
        if state is None:
            params = getattr(request, "kv_transfer_params", None)
            # A prefill instance's own requests (`do_remote_decode`) read the tier like any other: not a hand-off.
            handoff = isinstance(params, dict) and bool(params.get("do_remote_prefill"))
            state = self.table.arrive(request, handoff=handoff)
        return state

    def _reading(self, leg: Leg, prompt_tokens: int) -> None:
        """A lookup that itself moves the data is a read in flight until it is answered."""
        if self.backend.capability.lookup_moves_data and not leg.reading and not leg.end:
            leg.reading = True
            pace = self.table.pace(self.backend)
            costs = pace.costs
            size, projected, longest = 0, 0.0, 0.0
            if costs is not None:  # how much it will find is not known
                size = int(costs.typical_tokens * self.backend.token_bytes)
                projected, longest = costs.lookup(size), costs.lookup(prompt_tokens * self.backend.token_bytes)
            pace.begin(leg.span_id, leg.start or self.table.clock(), projected, size, longest)

    def _looked_up(self, leg: Leg, local: int, tokens: int) -> None:
        pace = self.table.pace(self.backend)
        if leg.reading:
            leg.reading = False
            costs = pace.costs
            if tokens <= 0:
                pace.forget(leg.span_id)  # a miss takes as long as a step of the engine: no word about the link
            else:
                moved = tokens + local  # the store sends what vLLM holds itself, too
                projected = costs.lookup(moved * self.backend.token_bytes) if costs is not None else 0.0
                steps = leg.polls - 1
                waited = min(2 * (leg.end - leg.start) // steps, leg.end - leg.start) if steps > 0 else 0
                pace.end(leg.span_id, leg.end, projected=projected, waited=waited)
        if leg.trickled and tokens <= 0:  # it told nothing: the next may be the trickle
            pace.last_trickle, leg.trickled = leg.trickled, 0

    def _traffic(self, state: RequestState, costs: Costs | None) -> tuple[Traffic, Pace, int]:
        table = self.table
        now = table.clock()
        pace = table.pace(self.backend)
        if pace.costs is not costs:
            pace.learn(costs)
        pace.age_out(now)
        traffic = Traffic(
            *pace.flight(now), table.running, table.waiting - (not state.first and not state.away),
            table.backlog - state.todo, (now - state.arrival) / 1e9, pace.slowdown(now), pace.overdue(now),
        )  # fmt: skip
        return traffic, pace, now

    def _decide_lookup(self, state: RequestState, leg: Leg, request: Any, local: int | None) -> None:
        directive = self._current(self.backend.label)
        traffic, pace, now = self._traffic(state, directive.costs if directive is not None else None)
        leg.skip = gate.admit_lookup(
            directive,
            self.backend.capability,
            prompt_tokens=state.prompt_tokens,
            local_tokens=local,
            token_bytes=self.backend.token_bytes,
            traffic=traffic,
            handoff=state.handoff or self._handoff,
            load_failed=state.load_failed,
            unusable=bool(getattr(request, "skip_reading_prefix_cache", False)),
            broken=pace.broken(now),
            trickle_due=directive is not None and pace.trickle_due(now, directive.reads.trickle_seconds),
            draw=state.draw,
        )
        if leg.skip.reason == gate.TRICKLE:
            leg.trickled, pace.last_trickle = pace.last_trickle, now
        self._decided(leg, directive, leg.skip)

    def _decide_load(self, state: RequestState, leg: Leg, tokens: int) -> None:
        directive = self._current(self.backend.label)
        traffic, pace, now = self._traffic(state, directive.costs if directive is not None else None)
        leg.load = gate.admit_load(
            directive,
            self.backend.capability,
            matched_tokens=tokens,
            matched_bytes=tokens * self.backend.token_bytes,
            prompt_tokens=state.prompt_tokens,
            local_tokens=leg.local,
            traffic=traffic,
            handoff=state.handoff or self._handoff,
            load_failed=state.load_failed,
            broken=pace.broken(now),
            trickle_due=directive is not None and pace.trickle_due(now, directive.reads.trickle_seconds),
            trickle=leg.trickled != 0,
            draw=state.draw,
        )
        if leg.load.reason == gate.TRICKLE and not leg.trickled:
            pace.last_trickle = now
        self._decided(leg, directive, leg.load)

    def _decided(self, leg: Leg, directive: Directive | None, decision: Decision) -> None:
        leg.directive_id = directive.id if directive is not None else ""
        holdout = directive.reads.holdout if directive is not None and directive.mode == semconv.MODE_AUTO else 0.0
        if holdout:
            leg.propensity = holdout if decision.reason == gate.HOLDOUT else 1.0 - holdout


def _context(state: RequestState, leg: Leg | None) -> Context:
    return Context(state.internal_id, state.trace_id, state.sampled, state.span_id, leg.span_id if leg else 0)
