"""What the picture is drawn from: points measured, lines projected, figures with their sources."""

from dataclasses import replace

import pytest

from guard.correlate.against_rtt import LEAST, against_rtt
from guard.estimate.shapes import Cell, FetchModel, Figure, LookupModel, PrefillModel, Verdict
from guard.service.console.picture import curves, picture

NOW_NS = 1_800_000_000 * 10**9
CELL = Cell(
    model="m", backend="a/b", class_="all", n=500, fetch=FetchModel(t0=0.01, kappa=40.0, seconds_per_byte=1e-9),
    lookup=LookupModel(t0=0.002, kappa=10.0), prefill=PrefillModel(a=0.01, b=1e-4), bytes_per_token=1e5,
    reference_tokens=2000, reference_matched=1000, rest=0.11, saved=Figure(value=0.1, n=480),
    rtt_now=0.0012, rtt_floor=0.0002, rtt_low=0.0002, rtt_high=0.004,
    departure=Figure(value=0.0006, low=0.0005, high=0.0008, n=480), break_even=Figure(value=0.0025, n=480),
    verdict=Verdict(state="departed", cause="rtt", shape="knee", reason="TTFT is 18 % over its floor"),
)  # fmt: skip


def test_points_are_quartiles_per_band_and_road(record):
    near = [record(rtt=0.0011, ttft=ttft) for ttft in (0.1, 0.2, 0.3, 0.4, 0.5)]
    far = [record(rtt=0.0101, ttft=1.0) for _ in range(LEAST)]
    told = [record(ttft=0.6, decision="skip") for _ in range(LEAST)]
    for one in told:
        one.rtt = 0.0011  # a skipped request has no fetch: its RTT comes from the probes
    points = against_rtt([*near, *far, *told])
    assert [(point["rtt"], point["n"]) for point in points["remote"]] == [(0.0011, 5), (0.0101, 5)]
    assert points["remote"][0]["ttft"] == pytest.approx({"p25": 0.2, "p50": 0.3, "p75": 0.4})
    assert points["recompute"] == [{"rtt": 0.0011, "ttft": {"p25": 0.6, "p50": 0.6, "p75": 0.6}, "n": 5}]


def test_what_makes_no_point(record):
    few = [record(rtt=0.001) for _ in range(LEAST - 1)]
    others = [
        record(rtt=0.001, ttft=None, aborted=True), record(rtt=0.001, handoff=True), record(rtt=0.001, decision="none"),
        record(rtt=0.001, decision="other-tier"), record(rtt=0.0),
    ]  # fmt: skip
    assert against_rtt([*few, *others]) == {"remote": [], "recompute": []}


def test_a_refused_request_counts_at_the_rtt_of_the_last_read_before_it(record):
    read = record(rtt=0.002, arrival_ns=NOW_NS)
    soon = [record(ttft=0.5, decision="skip", arrival_ns=NOW_NS + second * 10**9) for second in range(1, 6)]
    late = [record(ttft=9.0, decision="skip", arrival_ns=NOW_NS + 11 * 10**9) for _ in range(LEAST)]
    before = [record(ttft=9.0, decision="skip", arrival_ns=NOW_NS - 10**9) for _ in range(LEAST)]
    assert against_rtt([*late, *soon, *before, read])["recompute"] == [
        {"rtt": 0.002, "ttft": {"p25": 0.5, "p50": 0.5, "p75": 0.5}, "n": 5}
    ]


def test_no_lines_at_one_rtt():
    still = replace(CELL, departure=Figure(value=200e-6, source="prior"), break_even=Figure(value=5e-4, source="prior"))
    assert curves(still, 1e-4, 1e-2) is None


def test_lines_are_those_of_the_models():
    # remote: 0.11 s prefill of the rest + 0.01 + 0.002 + 0.1 for 100 MB + 50 RTT; recompute: 0.21 s
    drawn = curves(CELL, 1e-4, 1e-2)
    assert drawn is not None
    assert drawn["source"] == "projected"
    assert drawn["remote"][0] == pytest.approx(0.11 + 0.01 + 0.1 + 0.002 + 50 * 1e-4)
    assert drawn["remote"][-1] == pytest.approx(0.222 + 50 * 1e-2)
    assert drawn["recompute"] == pytest.approx([0.21] * 49)
    assert (drawn["rtt"][0], drawn["rtt"][-1]) == (pytest.approx(1e-4), pytest.approx(1e-2))


def test_no_lines_until_the_models_are_there():
    assert curves(Cell(model="m", backend="a/b", class_="all"), 1e-4, 1e-2) is None


def test_without_data_there_is_no_picture():
    assert picture([], [], NOW_NS) == {"choices": [], "picture": None}


def test_until_data_the_figures_are_priors(record):
    drawn = picture([record(rtt=0.001)], [], NOW_NS)["picture"]
    assert (drawn["departure"]["value"], drawn["departure"]["source"]) == (200e-6, "prior")
    assert (drawn["break_even"]["value"], drawn["break_even"]["source"]) == (500e-6, "prior")
    assert (drawn["curves"], drawn["verdict"]["state"]) == (None, "insufficient-data")
    assert drawn["axis"] == pytest.approx({"low": 200e-6 / 1.5, "high": 0.0015})


def test_the_cell_of_the_choice_is_drawn(record):
    records = [record(rtt=0.001) for _ in range(6)] + [record(rtt=0.002, backend="c/d", class_="x")]
    answer = picture(records, [CELL], NOW_NS)
    assert answer["choices"] == [
        {"model": "m", "backend": "a/b", "n": 6, "classes": ["1k-2k/c0-4"]},
        {"model": "m", "backend": "c/d", "n": 1, "classes": ["x"]},
    ]
    drawn = answer["picture"]
    assert (drawn["backend"], drawn["n"], drawn["verdict"]["cause"]) == ("a/b", 6, "rtt")
    assert drawn["departure"] == {
        "value": 0.0006, "low": 0.0005, "high": 0.0008, "n": 480, "source": "measured", "reason": "",
    }  # fmt: skip
    assert drawn["rtt"] == {"now": 0.001, "floor": 0.0002, "low": 0.0002, "high": 0.004}
    assert drawn["now"] == {"ttft": 0.4, "n": 6, "seconds": 15.0}
    other = picture(records, [CELL], NOW_NS, backend="c/d", class_="x")["picture"]
    assert (other["backend"], other["n"], other["departure"]["source"]) == ("c/d", 1, "prior")
    assert picture(records, [CELL], NOW_NS, backend="nobody")["picture"] is None
