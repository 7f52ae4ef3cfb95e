"""The controllers in the service: evidence gathered, plans made, told and kept. No HTTP, a clock by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from guard import semconv
from guard.control.shapes import Plan
from guard.estimate.shapes import Cell, FetchModel, LookupModel, PrefillModel
from guard.history.shapes import Override
from guard.service import offload
from guard.service.controlled import gauges
from guard.service.controlling import Controlling
from guard.service.directives import Clock
from guard.slo.objective import Objective, Objectives
from guard.wire import Event, FetchRecord, RequestRecord

CELL = Cell(
    model="m", backend="b", class_="all", n=500, bytes_per_token=1000.0,
    fetch=FetchModel(t0=0.05, kappa=30.0, spread=0.05, n=500),
    lookup=LookupModel(t0=0.001, hit_probability=0.9, expected_tokens=3800, n=500),
    prefill=PrefillModel(a=0.0, b=1e-4, spread=0.05, n=500),
    rtt_floor=1e-4, rtt_now=1e-4, reference_tokens=4000, reference_matched=3800,
)  # fmt: skip


class Bench:
    """One service's controllers; `rtt` and `answers` are what probes say."""

    def __init__(self, *objectives: Objective, kept: dict[str, Any] | None = None, engines: int = 1) -> None:
        self.now, self.rtt, self.answers = 1000.0, 1e-4, True
        self.cells: tuple[Cell, ...] = (CELL,)
        self.events: list[Event] = []
        self.counts: list[tuple[str, ...]] = []
        self.engines = [(f"e{number}", "m", ("b",)) for number in range(engines)]
        self.serial = 0
        self.made = Controlling(
            Clock(lambda: self.now + 1e9, lambda: self.now), lambda: Objectives(objectives), cells=lambda: self.cells,
            link=lambda _: (self.rtt, self.answers), publish=self.events.append,
            count=lambda metric, *labels, **_: self.counts.append((metric.name, *labels)), kept=kept,
        )  # fmt: skip

    def step(self, seconds: float = 0.25) -> bool:
        self.now += seconds
        return bool(self.made.step(self.engines))

    def run(self, seconds: float) -> int:
        return sum(self.step() for _ in range(int(seconds * 4)))

    def plan(self, engine: str = "e0") -> Plan:
        found = self.made.plan(engine, "b")
        assert found is not None
        return found

    def request(self, engine: str = "e0", seconds: float = 0.05, outcome: str = "ok", **changed: Any) -> RequestRecord:
        self.serial += 1
        fetch = FetchRecord(
            span_id=f"f{self.serial}", attempt=1, start_ns=0, seconds=seconds, outcome=outcome, tokens=3800,
            bytes=3_800_000, inflight=1,
        )  # fmt: skip
        values: dict[str, Any] = {
            "internal_id": "i", "request_id": "r", "trace_id": "t", "span_id": f"s{self.serial}", "engine_id": engine,
            "model": "m", "backend": "b", "class_": "2k-4k/c0-4", "arrival_ns": 0, "prompt_tokens": 4000,
            "tokens_local": 0, "tokens_matched": 3800, "tokens_loaded": 3800, "tokens_computed": 200,
            "ttft": 0.02 + seconds, "intake": 0.0, "queue": 0.0, "lookup": 0.001, "slot": 0.0, "fetch": seconds,
            "resume": 0.0, "prefill": 0.02, "residual": 0.0, "exposed_wait": seconds, "decision": "remote",
            "reason": "auto", "fetches": [fetch], "rtt": self.rtt,
        }  # fmt: skip
        record = RequestRecord(**{**values, **changed})
        self.made.take(record)
        self.made.judge(record)
        return record


def test_a_steady_engine_is_asked_once_and_not_woken_again() -> None:
    bench = Bench()
    assert bench.step()
    assert bench.plan().state == "open"
    bench.run(5)
    for number in range(400):
        bench.request(seconds=0.05 * (1 + 0.05 * (-1) ** number))
        bench.step()
    assert bench.plan().state == "open"
    changes = sum(bench.step() for _ in range(40))
    assert changes == 0
    assert bench.events == []


def test_a_link_that_loses_is_told_with_its_evidence_and_comes_back() -> None:
    bench = Bench()
    bench.run(5)
    bench.rtt = 0.05
    bench.run(5)
    assert bench.plan().state == "bypass"
    (event,) = [one for one in bench.events if one.evidence["to"] == "bypass"]
    assert (event.kind, event.scope) == (semconv.EVENT_CONTROLLER, "engine:e0")
    assert event.evidence["rtt"] == 0.05
    assert event.evidence["best"] > 1.15
    bench.rtt = 1e-4
    bench.run(1)
    assert bench.plan().state == "half-open"
    for _ in range(2):
        bench.request(reason="trickle")
        bench.step()
    assert bench.plan().state == "open"


def test_a9_one_sick_engine_of_eight_is_alone_in_bypass() -> None:
    bench = Bench(engines=8)
    bench.run(3)
    for _ in range(8):
        for number in range(8):
            if number == 3:
                bench.request("e3", outcome="failed")
            else:
                bench.request(f"e{number}")
        bench.step()
    states = {name: bench.plan(name).state for name, _, _ in bench.engines}
    assert states.pop("e3") == "bypass"
    assert set(states.values()) == {"open"}


def test_a_read_in_flight_that_does_not_end_stops_others_and_a_silent_hook_does_not() -> None:
    bench = Bench()
    bench.run(3)
    bench.made.hook("e0", ("p",), {semconv.HOOK_READS: json.dumps({"b": [2, 5000, 3.0]})})
    bench.step()
    assert (bench.plan().state, bench.plan().reason) == ("bypass", "stalled")
    found = {metric.name: value for metric, labels, value in gauges(bench.made) if labels[:3] == ("m", "e0", "b")}
    assert found["kvguard_kv_fetch_inflight"] == 2.0
    assert found["kvguard_kv_fetch_oldest_age_seconds"] == 3.0
    other = Bench()
    other.run(3)
    other.made.hook("e0", ("p",), {semconv.HOOK_READS: json.dumps({"b": [2, 5000, 0.01]})})
    other.run(10)  # nothing was heard of the hook since
    assert other.plan().state == "open"


def test_what_the_others_of_a_backend_have_in_flight_is_reckoned_with() -> None:
    bench = Bench(engines=3)
    assert CELL.fetch is not None
    bench.cells = (replace(CELL, fetch=replace(CELL.fetch, seconds_per_inflight_byte=1e-8)),)
    bench.run(3)
    alone = bench.plan().coefficients.fetch["seconds"]
    for engine in ("e1", "e2"):
        bench.made.hook(engine, ("p",), {semconv.HOOK_READS: json.dumps({"b": [1, 10_000_000, 0.01]})})
    bench.run(1)
    assert bench.plan().coefficients.fetch["seconds"] == pytest.approx(alone + 0.2, rel=0.01)
    assert bench.plan("e1").coefficients.fetch["seconds"] == pytest.approx(alone + 0.1, rel=0.01)


def test_the_first_engine_that_reads_again_brings_the_others_of_its_backend_back() -> None:
    bench = Bench(engines=3)
    bench.run(3)
    for _ in range(4):
        for engine in ("e0", "e1"):
            bench.request(engine, outcome="failed")
    bench.step()
    assert [bench.plan(f"e{n}").state for n in range(3)] == ["bypass", "bypass", "open"]
    bench.run(2.25)
    assert [bench.plan(f"e{n}").state for n in range(3)] == ["half-open", "half-open", "open"]
    bench.request("e1", seconds=3.0, reason="trickle")
    bench.run(3.0)
    bench.request("e1", seconds=3.0, reason="trickle", outcome="failed")
    bench.step()
    assert bench.plan("e1").state == "bypass"
    for _ in range(2):
        bench.request("e0", reason="trickle")
        bench.step()
    assert [bench.plan(f"e{n}").state for n in range(3)] == ["open", "bypass", "open"]
    bench.run(1.0)
    assert [bench.plan(f"e{n}").state for n in range(3)] == ["open", "half-open", "open"]
    assert bench.plan("e1").reason == "healed"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"b": [1]}', '{"b": ["x", 1, 2]}', '{"b": [-1, 0, 0]}', 7, "NaN"])
def test_what_a_hook_tells_and_cannot_be_read_is_left_out(text: object) -> None:
    bench = Bench()
    bench.made.hook("e0", ("p",), {semconv.HOOK_READS: text})  # type: ignore[dict-item]
    bench.run(2)
    assert bench.made.flight(("e0", "b")) == (0, 0, 0.0)


def test_an_objective_that_neither_road_meets_takes_the_cheaper_and_is_told_once() -> None:
    bench = Bench(Objective(ttft_seconds=0.01))
    bench.run(10)
    assert bench.plan().state == "open"  # remote is the cheaper one
    (event,) = bench.events
    assert (event.kind, event.evidence["attainable"], event.evidence["source"]) == ("sla", False, "projected")
    easy = Bench(Objective(ttft_seconds=5.0))
    easy.run(10)
    assert easy.events == []


def test_requests_are_counted_against_their_objective() -> None:
    bench = Bench(Objective(ttft_seconds=0.1))
    bench.run(1)
    bench.request()
    bench.request(seconds=0.5)
    bench.request(ttft=None, aborted=True)
    outcomes = [labels[-1] for labels in bench.counts if labels[0] == "kvguard_sla_requests_total"]
    assert outcomes == ["met", "missed"]
    stood = bench.made.standing(("e0", "b"), Objective(ttft_seconds=0.1))
    assert (stood.met, stood.missed) == (1, 1)


def test_observe_tells_what_auto_would_have_gained() -> None:
    bench = Bench()
    bench.run(1)
    bench.request(seconds=1.0, reason="would-projected")
    bench.request(reason="observe")
    held = bench.made.gathered.of(("e0", "b"))
    assert held.would == 1
    assert held.would_gain == pytest.approx(1.001 - 0.38)


def test_a_restart_in_mid_throttle_goes_on_without_a_jump() -> None:
    bench = Bench()
    bench.run(5)
    bench.rtt = 0.05
    bench.run(6)
    kept = bench.made.save()
    assert kept is not None
    again = Bench(kept=json.loads(json.dumps(kept)))
    again.rtt = 0.05
    again.step()
    assert again.plan().state == "bypass"
    assert again.plan().coefficients == bench.plan().coefficients
    assert again.events == []


def test_without_cells_nothing_is_asked_and_nothing_kept() -> None:
    bench = Bench()
    bench.cells = ()
    bench.run(5)
    plan = bench.plan()
    assert (plan.state, plan.coefficients.fetch, plan.reads.share) == ("open", {}, 1.0)
    assert bench.made.save() is None


def override(mode: str) -> Override:
    return Override(
        scope="fleet", mode=mode, stores=True, on_lease_expiry="open", expires_at=None, reason="", who="ann", since=0.0
    )


def test_on_and_off_are_the_operators_word_and_observe_carries_the_plan() -> None:
    bench = Bench()
    bench.run(5)
    bench.rtt = 0.05
    bench.run(5)
    made = {
        mode: offload.directive("e0", "b", override(mode), 0.0, bench.plan())
        for mode in ("on", "off", "auto", "observe")
    }
    assert (made["on"].state, made["on"].costs, made["on"].reads.share) == ("open", None, 1.0)
    assert (made["off"].mode, made["off"].costs) == ("off", None)
    assert (made["auto"].state, made["auto"].reads.share) == ("bypass", 0.0)
    assert (made["observe"].state, made["observe"].mode) == ("bypass", "observe")
    assert made["auto"].costs is not None
    moved = replace(bench.plan(), reason="other")
    assert offload.directive("e0", "b", None, 0.0, moved).id != made["auto"].id


def told(plan: Plan) -> tuple[object, ...]:
    return plan.state, plan.reason, plan.reads, plan.coefficients


def test_engines_that_join_are_not_told_twice() -> None:
    bench = Bench(engines=200)
    bench.cells = ()
    first = {engine: told(bench.made.asked(engine, "b")) for engine, _, _ in bench.engines}
    bench.step()
    assert {engine: told(bench.plan(engine)) for engine in first} == first


def test_only_those_of_which_something_else_is_asked_are_told() -> None:
    bench = Bench(engines=3)
    bench.run(3)
    for _ in range(8):
        for number in range(3):
            bench.request(f"e{number}", outcome="failed" if number == 1 else "ok")
    bench.now += 0.25
    assert bench.made.step(bench.engines) == {"e1"}
    assert bench.made.step(bench.engines) == set()


def test_a_stopped_engine_tries_when_another_opened_again_not_for_its_own_last_time() -> None:
    bench = Bench(engines=3)
    bench.run(1)
    stopped = bench.made.units["e1", "b"]
    stopped.state = replace(stopped.state, name="bypass", since=bench.now, reason="failures", backoff=60.0)
    stopped.healed = bench.now + 1.0  # the latest of all, but its own
    bench.made.units["e0", "b"].healed = bench.now - 1.0
    bench.run(2)
    assert bench.plan("e1").state == "bypass"
    bench.made.units["e2", "b"].healed = stopped.state.since + 0.5
    bench.run(1)
    assert bench.plan("e1").state == "half-open"


def test_engines_of_a_pool_share_their_tries() -> None:
    alone, pool = Bench(), Bench(engines=8)
    for bench in (alone, pool):
        bench.run(2.0)
    one, many = (bench.plan().reads.trickle_seconds for bench in (alone, pool))
    assert one is not None
    assert many == 8 * one


def test_a_first_burst_of_many_engines_is_bounded_and_a_restart_keeps_what_was_learned() -> None:
    def parts(bench: Bench) -> list[int | None]:
        return [bench.plan(name).reads.max_inflight for name, _, _ in bench.engines]

    bench = Bench(engines=8)
    assert CELL.fetch is not None
    bench.cells = (replace(CELL, fetch=replace(CELL.fetch, seconds_per_byte=3e-8)),)  # 0.114 s of 3.8 MB, saves 0.38 s
    bench.step()
    assert sorted(parts(bench), key=str) == [0] * 6 + [1] * 2
    for number in range(40):
        bench.request(f"e{number % 8}", seconds=0.17)
        bench.step()
    assert set(parts(bench)) == {None}
    kept = bench.made.save()
    again = Bench(kept=json.loads(json.dumps(kept)), engines=8)
    again.cells = bench.cells
    again.step()
    assert set(parts(again)) == {None}


def test_an_engine_that_was_silent_for_a_while_comes_back_as_it_was() -> None:
    bench = Bench(engines=2)
    bench.run(1)
    unit = bench.made.units["e1", "b"]
    unit.state = replace(unit.state, name="bypass", since=bench.now, reason="failures", backoff=60.0)
    both, bench.engines = bench.engines, bench.engines[:1]
    bench.run(2)
    assert ("e1", "b") not in bench.made.units
    bench.engines = both
    bench.step()
    assert bench.made.units["e1", "b"].state.name == "bypass"


def test_what_fails_for_one_engine_costs_nobody_else_their_turn() -> None:
    bench = Bench(engines=2)
    bench.run(1)
    bench.made.units["e0", "b"].state = None  # type: ignore[assignment]  # as a bug would leave it
    bench.made.units["e0", "b"].decided = float("-inf")
    before = bench.made.units["e1", "b"].decided
    bench.run(2)
    assert bench.made.units["e1", "b"].decided > before
    assert bench.plan("e0").state == "open"  # afresh


def test_an_engine_whose_controller_fails_does_not_keep_its_last_directive() -> None:
    bench = Bench(engines=2)
    bench.run(1)
    stopped = bench.made.units["e0", "b"]
    stopped.state = replace(stopped.state, name="bypass", since=bench.now, reason="failures", backoff=60.0)
    bench.run(1)
    assert bench.plan("e0").state == "bypass"
    bench.rtt = "?"  # type: ignore[assignment]  # it fails again and again, as a bug would
    bench.made.units["e1", "b"].decided = float("inf")
    bench.made.units["e1", "b"].link = bench.rtt, True  # type: ignore[assignment]  # and has nothing to do for the other
    bench.now += 0.25
    assert bench.made.step(bench.engines) == {"e0"}
    assert bench.made.asked("e0", "b").state == "open"
    assert bench.made.step(bench.engines) == set()  # the same is asked of it still
    bench.rtt = 1e-4
    assert "e0" in bench.made.step(bench.engines)
    assert bench.plan("e0").state == "open"
