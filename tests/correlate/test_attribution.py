import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard import semconv as s
from guard.correlate.attribution import report
from guard.correlate.explain import explain
from guard.correlate.frame import frame
from guard.correlate.join import Joiner
from guard.correlate.records import PARTS
from guard.correlate.stats import correlation, quantile, summary
from guard.correlate.window import Window


@pytest.fixture
def window_of(spans):
    """A window of requests given by their attributes."""

    def make(rows):
        joiner, window = Joiner(), Window()
        for number, row in enumerate(rows):
            joiner.add({}, spans.one(number, **{"server": 0, "ranks": 1, "reads": 0, **row}), 0)
        for record in joiner.advance(20 * 10**9):
            window.add(record)
        return window

    return make


def test_parts_are_shares_of_ttft(window_of):
    """Ten requests of 1 s and ten of 3 s, of which the fetch takes half and two thirds."""
    fast = {s.TTFT: 1.0, s.TIME_FETCH: 0.5, s.TIME_PREFILL: 0.25}
    slow = {s.TTFT: 3.0, s.TIME_FETCH: 2.0, s.TIME_PREFILL: 0.25}
    result = report(frame(window_of([fast, slow] * 10)), 600.0)
    assert (result["n"], result["window_seconds"], result["source"], result["simulated"]) == (20, 600.0, "measured", 0)
    (group,) = result["groups"]
    assert {key: group[key] for key in ("model", "backend", "class", "decision", "n")} == {
        "model": "m", "backend": "lmcache-mp/resp", "class": "1k-2k/c0-4", "decision": "remote", "n": 20,
    }  # fmt: skip
    assert group["ttft"] == {"mean": 2.0, "p50": 2.0, "p95": 3.0, "p99": None}
    assert tuple(group["parts"]) == PARTS
    assert group["parts"]["fetch"]["share"] == pytest.approx(25 / 40)
    assert group["parts"]["prefill"]["share"] == pytest.approx(5 / 40)
    assert group["parts"]["queue"]["mean"] == pytest.approx(0.02)
    assert group["miss_latency"]["n"] == 20
    assert group["miss_latency"]["mean"] == pytest.approx(1.25 + 0.03 + 0.04)
    assert group["exposed_wait"]["p50"] == pytest.approx(0.17)
    json.dumps(result, allow_nan=False)


def test_delaying_one_part_moves_that_part_and_no_other(window_of):
    """Attribution by intervention: 40 ms more in the lookup are 40 ms more of lookup, and 0 of the rest."""

    def parts(extra):
        rows = [{s.TIME_LOOKUP: 0.03 + extra, s.TTFT: 0.36 + extra}] * 30
        (group,) = report(frame(window_of(rows)), 600.0)["groups"]
        return {name: part["mean"] for name, part in group["parts"].items()}

    before, after = parts(0.0), parts(0.04)
    assert {name: round(after[name] - before[name], 9) for name in PARTS} == {
        **dict.fromkeys(PARTS, 0.0),
        "lookup": 0.04,
    }


def test_groups_are_kept_apart(window_of):
    idle = {s.TIME_LOOKUP: 0.0, s.TIME_FETCH: 0.0, s.TOKENS_LOADED: 0, s.TOKENS_MATCHED: 0, s.TIME_SLOT: 0.0}
    rows = [{}, {s.DECISION: "skip", **idle}, {s.INPUT_TOKENS: 9000}, {s.REQUEST_MODEL: "b"}, {s.BACKEND: "c"}] * 2
    groups = report(frame(window_of(rows)), 600.0)["groups"]
    assert [(one["model"], one["backend"], one["class"], one["decision"], one["n"]) for one in groups] == [
        ("b", "lmcache-mp/resp", "1k-2k/c0-4", "remote", 2),
        ("m", "c", "1k-2k/c0-4", "remote", 2),
        ("m", "lmcache-mp/resp", "1k-2k/c0-4", "remote", 2),
        ("m", "lmcache-mp/resp", "1k-2k/c0-4", "skip", 2),
        ("m", "lmcache-mp/resp", "8k-16k/c0-4", "remote", 2),
    ]
    assert groups[3]["miss_latency"] == {"n": 0, "mean": None, "p50": None, "p95": None, "p99": None}


def test_aborted_and_handed_off_requests_are_counted_and_left_out(window_of):
    rows = [{}, {s.TTFT: None, s.ABORTED: True}, {s.HANDOFF: True}, {s.SIMULATED: True}, {s.TTFT: 9.0, s.ABORTED: True}]
    result = report(frame(window_of(rows)), 600.0)
    assert (result["n"], result["excluded"], result["simulated"]) == (2, {"aborted": 2, "handoff": 1}, 1)


def test_ttft_that_follows_the_miss_latency_correlates(window_of):
    rng = np.random.default_rng(3)
    fetches = rng.gamma(2.0, 0.1, 200)
    rows = [{s.TIME_FETCH: float(f), s.TTFT: float(f + 0.25 + rng.normal(0, 0.01))} for f in fetches]
    (one,) = report(frame(window_of(rows)), 600.0)["correlation"]
    assert one["n"] == 200
    assert one["pearson"] > 0.98
    assert one["pearson_interval"][0] < one["pearson"] < one["pearson_interval"][1]
    assert one["note"] == ""
    means = [row["ttft_mean"] for row in one["table"]]
    assert means == sorted(means)
    assert sum(row["n"] for row in one["table"]) == 200
    assert one["table"][0]["miss_latency_from"] == pytest.approx(fetches.min() + 0.07)
    assert one["table"][-1]["miss_latency_to"] == pytest.approx(fetches.max() + 0.07)


def test_ttft_that_does_not_follow_it_has_an_interval_around_zero(window_of):
    rng = np.random.default_rng(4)
    rows = [{s.TIME_FETCH: float(rng.gamma(2, 0.1)), s.TTFT: float(1 + rng.gamma(2, 0.1))} for _ in range(300)]
    (one,) = report(frame(window_of(rows)), 600.0)["correlation"]
    for name in ("pearson_interval", "spearman_interval"):
        assert one[name][0] < 0.0 < one[name][1]


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ([{s.TIME_FETCH: index / 100} for index in range(29)], "insufficient-data: 29 of 30 requests"),
        ([{}] * 40, "insufficient-data: no variation"),
    ],
)
def test_too_little_data_gives_a_note_and_no_number(window_of, rows, note):
    (one,) = report(frame(window_of(rows)), 600.0)["correlation"]
    assert (one["note"], one["pearson"], one["spearman"], one["pearson_interval"], one["table"]) == (
        note, None, None, None, [],
    )  # fmt: skip


def test_residual(window_of):
    rows = frame(window_of([{s.TTFT: 0.36}] * 20))
    result = report(rows, 600.0)["residual"]
    assert result["n"] == 20
    assert result["p95"] == pytest.approx(0.015)  # vLLM says 0.365, the parts make 0.35
    assert result["share_p95"] == pytest.approx(0.015 / 0.365)


def test_quantiles_need_enough_values():
    hundred = np.arange(100.0)
    assert summary(hundred) == {"n": 100, "mean": 49.5, "p50": 49.5, "p95": pytest.approx(94.05), "p99": 98.01}
    assert quantile(hundred[:99], 0.99) is None
    assert quantile(hundred[:20], 0.95) == pytest.approx(18.05)
    assert quantile(hundred[:19], 0.95) is None
    assert quantile(hundred[:1], 0.5) == 0.0
    assert quantile(hundred[:0], 0.5) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=30, max_size=80))
def test_coefficients_agree_with_numpy_and_with_ranks(pairs):
    x, y = (np.array(side) for side in zip(*pairs, strict=True))
    result = correlation(x, y)
    if np.ptp(x) < 1e-6 or np.ptp(y) < 1e-6:
        return
    assert result["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    ranks = [[(sum(o < v for o in side) + sum(o <= v for o in side) - 1) / 2 for v in side] for side in (x, y)]
    assert result["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)
    assert -1.0 <= result["pearson_interval"][0] <= result["pearson"] <= result["pearson_interval"][1] <= 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_interval_of_a_perfect_correlation_holds_it(sign):
    x = np.arange(40.0)
    result = correlation(x, sign * 3.0 * x)
    for name in ("pearson", "spearman"):
        assert result[name] == pytest.approx(sign)
        low, high = result[f"{name}_interval"]
        assert low <= result[name] <= high


# -- One request ------------------------------------------------------------------------------------------------------


def test_explain_tells_the_timeline_the_attempts_and_what_was_slow(window_of):
    row = {s.TTFT: 20.24, s.TIME_FETCH: 19.9, "attempts": 2, "reads": 2, "ranks": 2, "server": 1}
    (record,) = window_of([row])
    told = explain(record)
    json.dumps(told, allow_nan=False)
    assert [(one["part"], one["start_seconds"], one["seconds"]) for one in told["timeline"]] == [
        ("intake", 0.0, 0.01), ("queue", pytest.approx(0.01), 0.02), ("lookup", pytest.approx(0.03), 0.03),
        ("slot", pytest.approx(0.06), 0.04), ("fetch", pytest.approx(0.1), 19.9),
        ("resume", pytest.approx(20.0), 0.05), ("prefill", pytest.approx(20.05), 0.1),
    ]  # fmt: skip
    first, second = told["fetches"]
    assert (first["outcome"], first["error_type"], first["start_seconds"]) == ("failed", "timeout", 0.1)
    assert (second["slowest_rank_seconds"], second["ranks"]) == (0.09, {"0": 0.08, "1": 0.09})
    assert second["reads"] == {"n": 2, "seconds": pytest.approx(0.0033), "bytes": 2001}
    assert told["server_spans"] == [{"name": "mp.retrieve", "start_seconds": 0.1, "seconds": 0.01}]
    assert told["words"][0] == "fetch took 98% of TTFT (19.90 s of 20.24 s): loading KV from the remote tier"
    assert "read 1024 of 2000 prompt tokens from lmcache-mp/resp" in told["words"]
    assert "fetch attempt 1 failed after 100.0 ms (timeout)" in told["words"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({s.TTFT: None, s.ABORTED: True}, "aborted before a first token"),
        ({s.HANDOFF: True}, "the KV came from a prefill instance: a hand-off, not a hit"),
        ({s.DECISION: "decline", s.DECISION_REASON: "mode off"}, "decision decline: mode off"),
        ({s.TOKENS_MATCHED: 0, s.TIME_LOOKUP: 0.6}, "the lookup took 600.0 ms and found nothing"),
        ({s.TOKENS_LOCAL: -1}, "out of range as sent, put right: kvguard.tokens.local"),
        ({s.TIME_PREFILL: 0.02}, "95.0 ms of TTFT are not explained by its parts"),
    ],
)
def test_explain_has_words_for_what_is_special(window_of, row, words):
    (record,) = window_of([row])
    assert words in explain(record)["words"]


def test_explain_says_nothing_of_a_small_residual(window_of):
    (record,) = window_of([{}])
    assert not any("not explained" in words for words in explain(record)["words"])
