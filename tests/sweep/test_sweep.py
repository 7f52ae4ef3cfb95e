import dataclasses
import json

import pytest

from guard.errors import ConfigError, SweepError
from guard.sweep import analysis, report
from guard.sweep.analysis import three_digits
from guard.sweep.plan import Plan, parse_rtt
from guard.sweep.results import CELLS, Results, load
from guard.sweep.runner import Sweep

RTTS = (0.0, 0.005, 0.01, 0.02, 0.04)


def plan(**more) -> Plan:
    return Plan(**{"rtts": RTTS, "concurrencies": (1, 4), "requests": 10, **more})


def sweep(world, directory, the_plan=None, **more):
    the_plan = the_plan or plan()
    results = Results(directory, the_plan, {"model": "fake", "date": "today", "machine": "none"})
    Sweep(the_plan, world, world, world, results, **more).run()
    return results


def test_it_finds_what_the_world_is_made_of(world, tmp_path):
    results = sweep(world, tmp_path, rtt=lambda: world.rtt + 0.0001)
    one, four = analysis.curves(results.cells.values())

    assert (one.concurrency, four.concurrency) == (1, 4)
    # 0.1 + 10 RTT = 0.3 at 20 ms; 10 % above 0.101 at 0.1 + 1.01 ms; the probe adds 0.1 ms to each.
    assert one.break_even.value == pytest.approx(0.0201, rel=0.05)
    assert one.break_even.low < 0.0201 < one.break_even.high
    assert one.departure.value == pytest.approx(0.0011, rel=0.5)
    assert one.departure.low < 0.0011 < one.departure.high
    assert one.round_trips.value == pytest.approx(10.0, rel=0.1)
    assert one.round_trips.low < 10.0 < one.round_trips.high
    assert one.reported_round_trips == 10
    assert one.recompute.value == pytest.approx(0.3, rel=0.03)
    assert one.local.value == pytest.approx(0.02, rel=0.03)
    assert [tier.rtt for tier in one.tiers] == pytest.approx([rtt + 0.0001 for rtt in RTTS])
    assert "stops paying at an RTT of 20" in one.words


def test_roads_and_tiers_are_what_the_plan_says(world, tmp_path):
    results = sweep(world, tmp_path)
    assert set(results.cells) == {cell.key for cell in plan().cells()}
    assert len(results.cells) == 5 * 2 * 3 * 2
    for measured in results.cells.values():
        assert (len(measured.samples), measured.strays) == (10, 0)
    assert (world.rtt, world.mode, world.log) == (0.0, "auto", ["restored", "restored"])


def test_cut_off_it_puts_everything_back_and_goes_on_where_it_was(world, tmp_path):
    world.fails_at = f"{list(dict.fromkeys(cell.rtt for cell in plan().cells()))[3]:g}"  # the fourth tier
    with pytest.raises(SweepError, match="the wire broke"):
        sweep(world, tmp_path)
    assert (world.rtt, world.mode) == (0.0, "auto")
    done = (tmp_path / CELLS).read_text().splitlines()
    assert 0 < len(done) < 60
    (tmp_path / CELLS).write_text("\n".join(done) + '\n{"cell": {"rtt": 0')  # as a crash leaves it

    world.fails_at = ""
    asked = len(world.records)
    results = sweep(world, tmp_path)
    assert len(results.cells) == 60
    assert len(world.records) - asked == (60 - len(done)) * 10 + 20 + 1  # the cells left, the prompts, one to count
    assert len(load(tmp_path)[1]) == 60
    sweep(world, tmp_path)  # nothing is left to do
    assert world.log == ["restored"] * 4


def test_another_plan_does_not_mix_with_old_results(world, tmp_path):
    sweep(world, tmp_path)
    with pytest.raises(SweepError, match="another plan"):
        sweep(world, tmp_path, plan(requests=11))


def test_a_directory_that_holds_something_else_is_left_alone(world, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(SweepError, match="name another --out"):
        sweep(world, tmp_path)
    with pytest.raises(SweepError, match="no results"):
        load(tmp_path)


def test_an_operators_switch_is_not_overwritten(world, tmp_path):
    world.override = True
    with pytest.raises(SweepError, match="clear it first"):
        sweep(world, tmp_path)
    assert world.records == {}


def test_a_tier_that_keeps_nothing_is_said(world, tmp_path, monkeypatch):
    monkeypatch.setattr("guard.sweep.runner.STORE_SECONDS", 0.0)
    world.loses_stores = True
    with pytest.raises(SweepError, match=r"0 of 10 requests took the road.*is the remote tier writable"):
        sweep(world, tmp_path)
    assert world.log == ["restored", "restored"]


def test_remote_that_always_loses_or_always_pays(world, tmp_path):
    world.recompute = 0.05
    (curve,) = analysis.curves(sweep(world, tmp_path / "a", plan(concurrencies=(1,))).cells.values())
    assert curve.break_even.reason.startswith("reached at the fastest tier")
    assert "stay local" in curve.words
    world.recompute = 5.0
    (curve,) = analysis.curves(sweep(world, tmp_path / "b", plan(concurrencies=(1,))).cells.values())
    assert (curve.break_even.value, curve.break_even.high) == (None, None)
    assert "none in range" in curve.break_even.reason
    assert "pays at every tier" in curve.words


def test_an_injector_beside_the_road_is_noticed(world, tmp_path):
    world.trips = 0.0
    (curve,) = analysis.curves(sweep(world, tmp_path, plan(concurrencies=(1,))).cells.values())
    assert "does the injector stand in the road" in curve.words


def test_one_tier_is_too_little_for_a_crossing(world, tmp_path):
    (curve,) = analysis.curves(sweep(world, tmp_path, plan(concurrencies=(1,), rtts=(0.0,))).cells.values())
    assert curve.departure.value is None
    assert "insufficient data" in curve.departure.reason
    assert curve.tiers[0].remote.value == pytest.approx(0.1, rel=0.05)


def test_the_report_is_one_file_with_everything_in_it(world, tmp_path):
    results = sweep(world, tmp_path)
    found = analysis.curves(results.cells.values())
    facts, _ = load(tmp_path)
    page = report.write(tmp_path, found, facts).read_text()
    assert page.count("<svg") == 2
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page
    for curve in found:
        assert curve.words in page
    data = json.loads((tmp_path / "report.json").read_text())
    assert [curve["concurrency"] for curve in data["curves"]] == [1, 4]
    assert data["curves"][0]["break_even"] == dataclasses.asdict(found[0].break_even)
    assert data["source"] == "measured"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rtts": ()}, "rtts"), ({"rtts": (0.0, 0.0)}, "rtts"), ({"rtts": (11.0,)}, "rtts"),
        ({"concurrencies": (0,)}, "concurrency"), ({"requests": 1}, "requests"),
        ({"prompt_tokens": 3}, "prompt-tokens"),
        ({"repeats": 0}, "repeats"), ({"output_tokens": 0}, "output-tokens"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_measured_names_its_option(change, key):
    with pytest.raises(ConfigError) as error:
        plan(**change)
    assert error.value.key == key


def test_round_trip_times_have_units():
    assert [parse_rtt(text) for text in ("0", "2", "200us", "1.5ms", "2s")] == pytest.approx([0, 2e-3, 2e-4, 1.5e-3, 2])
    for text in ("", "-1", "1m", "nan", "11s"):
        with pytest.raises(ConfigError, match="rtts"):
            parse_rtt(text)


def test_remote_and_recompute_stand_side_by_side_in_random_order():
    cells = list(plan(local=False, repeats=4).cells())
    firsts = [cells[i].road for i in range(0, len(cells), 2)]
    for first, second in zip(cells[::2], cells[1::2], strict=True):
        assert (first.rtt, first.concurrency, first.repeat) == (second.rtt, second.concurrency, second.repeat)
        assert {first.road, second.road} == {"remote", "recompute"}
    assert 10 < firsts.count("remote") < 30
    assert cells == list(plan(local=False, repeats=4).cells())


def test_large_figures_are_written_in_full() -> None:
    values = (2281.3, 12_345.0, 47.31, 0.60214, 0.0)

    assert [three_digits(value) for value in values] == ["2,280", "12,300", "47.3", "0.602", "0"]
