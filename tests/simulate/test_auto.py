from collections import Counter

import pytest

from benchmarks.policies import STEPS, Step, judge, resumed, reversals, sla, within
from guard.gate import TRICKLE
from guard.simulate import scenario
from guard.simulate.results import Result, Row
from guard.simulate.run import simulate
from guard.simulate.scenario import Change, Scenario


def short(name: str, seconds: float, engines: int, *changes: Change) -> Scenario:
    """A shipped scenario made small: fewer engines with the same load each, changes at other times."""
    made = scenario.load(name)
    work = scenario.scaled(made.workload, engines / made.engine.count)
    engine = made.engine.model_copy(update={"count": engines})
    link = made.link.model_copy(update={"change": changes, "gbit": made.link.gbit * engines / made.engine.count})
    return made.model_copy(update={"seconds": seconds, "engine": engine, "workload": work, "link": link})


def change(**keys: object) -> Change:
    return Change.model_validate(keys)


def mean(result: Result) -> float:
    return float(result.ttft().mean())


@pytest.fixture(scope="module")
def stepped() -> dict[str, Result]:
    made = short("rtt-step", 130.0, 2, change(**{"at": 60, "for": 35, "rtt": "20ms"}))
    return {policy: simulate(made, policy) for policy in ("always", "never", "auto")}


def test_auto_beats_both_fixed_choices_where_the_link_changes(stepped: dict[str, Result]):
    fixed = [stepped["always"], stepped["never"]]
    assert mean(stepped["auto"]) < 1.1 * min(map(mean, fixed))
    bound = sla(fixed, 0.7)
    assert within(stepped["auto"], bound) > 0.97 * max(within(each, bound) for each in fixed)


def test_auto_reads_on_the_good_link_and_stops_on_the_bad_one(stepped: dict[str, Result]):
    rows = stepped["auto"].rows
    hits = [row for row in rows if row.reason != "miss"]  # a refused one may have been a miss, too

    def share(start: float, end: float) -> float:
        found = [row for row in hits if start <= row.arrival < end]
        assert len(found) >= 10
        return sum(row.loaded > 0 and row.reason != TRICKLE for row in found) / len(found)

    assert share(5.0, 60.0) > 0.7
    assert share(64.0, 95.0) == 0.0
    assert share(105.0, 130.0) > 0.3
    always = [row for row in stepped["always"].rows if 64.0 <= row.arrival < 95.0 and row.loaded]
    assert len(always) > 20  # there was something to read


def test_auto_leaks_no_permit_and_accounts_for_all_of_its_time(stepped: dict[str, Result]):
    auto = stepped["auto"]
    assert auto.leaked == 0
    assert sum(auto.states.values()) == pytest.approx(1.0)
    assert stepped["always"].states == {}


def test_auto_keeps_requests_out_of_a_black_hole():
    made = short("loss", 100.0, 1, change(**{"at": 50, "for": 30, "loss": 1.0}))
    always, auto = (simulate(made, policy) for policy in ("always", "auto"))
    late = [row for row in auto.rows if 55 < row.arrival < 80]
    assert late
    assert sum(row.ttft > 5.0 for row in late) <= 2  # a try now and then
    assert mean(auto) < 0.3 * mean(always)
    assert auto.leaked == 0


def test_the_same_seed_gives_the_same_decisions():
    made = short("steady", 25.0, 1)
    first, again = (simulate(made, "auto") for _ in range(2))
    assert not [row for row in first.rows if row.reason == "stalled"]  # and on a good link nothing is
    assert Counter(row.reason for row in first.rows) == Counter(row.reason for row in again.rows)
    assert first.rows == again.rows


# -- what the benchmark counts -----------------------------------------------------------------------------------------


def row(engine: int, start: float, *, loaded: int = 100, reason: str = "auto") -> Row:
    return Row(start, engine, 0.1, None, "remote", reason, waits=True, loaded=loaded, matched=100, read_start=start,
               aborted=False)  # fmt: skip


def result(*changes: tuple[float, int, str, str], rows: tuple[Row, ...] = (), leaked: int = 0) -> Result:
    return Result("s", "auto", 10.0, list(rows), 0, 1.0, None, changes=changes, leaked=leaked)


def test_a_reversal_is_between_reading_and_bypass_only():
    found = result(
        (1.0, 0, "limited", ""), (2.0, 0, "bypass", ""), (3.0, 0, "half-open", ""), (4.0, 0, "bypass", ""),
        (5.0, 0, "half-open", ""), (6.0, 0, "open", ""), (7.0, 1, "bypass", ""),
    )  # fmt: skip
    assert reversals(found, 0) == [2.0, 6.0]
    assert reversals(found, 1) == [7.0]


def test_reads_are_back_with_the_first_that_is_no_trickle():
    rows = (row(0, 9.0), row(0, 12.0, reason="trickle"), row(0, 13.0, loaded=0), row(0, 14.5), row(1, 11.0))
    assert resumed(result(rows=rows), 10.0, (0, 1, 2)) == {0: 4.5, 1: 1.0, 2: float("inf")}


def test_the_judge_fires_on_each_fault_and_not_without_one():
    step = Step("one", (5.0,), (10.0,), engines=(0,))
    good = [(6.0, 0, "bypass", ""), (12.0, 0, "open", "")]
    assert judge(step, result(*good, rows=(row(0, 12.5),)), 2) == []
    assert "3 reversals" in judge(step, result(*good, (13.0, 0, "bypass", ""), rows=(row(0, 12.5),)), 2)[0]
    assert (
        "engine 1: 1 reversals for 0" in judge(step, result(*good, (7.0, 1, "bypass", ""), rows=(row(0, 12.5),)), 2)[0]
    )
    assert "resumed after 12.5 s" in judge(step, result(*good, rows=(row(0, 22.5),)), 2)[0]
    assert judge(step, result(*good, rows=(row(0, 12.5),), leaked=2), 2) == ["2 permits leaked"]


def test_every_step_of_the_table_is_a_scenario_whose_changes_it_states():
    for step in STEPS:
        made = scenario.load(step.name)
        starts = {each.at + n * (each.every or 0) for each in made.link.change for n in range(10)}
        assert set(step.harm) <= starts
        if made.link.change:
            assert set(step.engines) == set(made.link.change[0].engines)
