from typing import Any

import pytest

from guard.errors import ConfigError
from guard.simulate.results import Result, Row, regret
from guard.simulate.run import POLICIES, simulate
from guard.simulate.scenario import Scenario, parse


def scenario(**more: Any) -> Scenario:
    link = {"gbit": 100.0, **more.pop("link", {})}
    workload = {"rate": 3.0, "users": 60, "first_tokens": 3000, **more.pop("workload", {})}
    engine = {"count": 2, "token_seconds": 8e-5, "local_tokens": 20_000, **more.pop("engine", {})}
    return parse({"seconds": 120, "link": link, "workload": workload, "engine": engine, **more})


def means(made: Scenario, *names: str) -> dict[str, float]:
    return {name: simulate(made, name).summary()["ttft_mean"] for name in names}


def test_the_same_seed_gives_the_same_outcome_and_another_seed_another():
    first, again, other = (simulate(scenario(seed=seed), "always") for seed in (1, 1, 2))
    assert first.rows == again.rows
    assert first.rows != other.rows


def test_a_policy_does_not_change_what_arrives():
    one, other = (simulate(scenario(), name) for name in ("always", "never"))
    assert [row.arrival for row in one.rows] == [row.arrival for row in other.rows]


def test_remote_pays_on_a_good_link_and_not_on_a_bad_one():
    good = means(scenario(link={"rtt": "100us"}), "always", "never", "clairvoyant")
    bad = means(scenario(link={"rtt": "50ms"}), "always", "never", "clairvoyant")
    assert good["always"] < 0.8 * good["never"]
    assert bad["always"] > 1.5 * bad["never"]
    assert good["clairvoyant"] <= 1.02 * good["always"]
    assert bad["clairvoyant"] <= 1.02 * bad["never"]


def test_the_rivals_do_what_their_names_say():
    good, bad = scenario(link={"rtt": "150us"}), scenario(link={"rtt": "5ms"})
    assert simulate(good, "threshold").rows == simulate(good, "always").rows
    assert simulate(bad, "threshold").rows == simulate(bad, "never").rows
    static = simulate(good, "static")
    assert min(row.matched for row in static.rows if row.waits) >= 1024
    slow = scenario(link={"rtt": "100ms"}, deadline="100ms")
    late = simulate(slow, "deadline").summary()
    assert late["decisions"]["decline"] > 0.3 * late["requests"]
    assert late["ttft_mean"] < 0.5 * simulate(slow, "always").summary()["ttft_mean"]


def test_a_black_hole_leaves_requests_without_an_answer_and_says_so():
    hole = scenario(link={"change": [{"at": 10, "loss": 1.0}]}, patience=20, connector={"timeout": "1h"})
    always, never = simulate(hole, "always").summary(), simulate(hole, "never").summary()
    assert always["unanswered"] > 100
    assert always["ttft_p99"] is None
    assert never["unanswered"] == 0


def test_unknown_policies_are_refused():
    with pytest.raises(ConfigError, match=r"'sometimes' is not one of always, never"):
        simulate(scenario(), "sometimes")


def row(ttft: float, tpot: float | None = None, *, aborted: bool = False) -> Row:
    return Row(0.0, 0, ttft, tpot, "none", "miss", waits=False, loaded=0, matched=0, read_start=0.0, aborted=aborted)


def result(policy: str, *rows: Row, tpot_bound: float | None = None) -> Result:
    return Result("s", policy, 10.0, list(rows), 0, ttft_bound=1.0, tpot_bound=tpot_bound)


def test_goodput_counts_what_meets_the_objective_per_second():
    rows = (row(0.5, 0.01), row(1.0, 0.03), row(1.1), row(float("inf")), row(float("inf"), aborted=True))
    found = result("always", *rows)
    assert found.goodput() == pytest.approx(0.2)
    assert found.good() == pytest.approx(0.5)
    assert result("always", *rows, tpot_bound=0.02).goodput() == pytest.approx(0.1)
    summary = found.summary()
    assert (summary["unanswered"], summary["ttft_p50"], summary["ttft_p99"]) == (1, 1.1, None)
    assert summary["ttft_mean"] == pytest.approx((0.5 + 1.0 + 1.1) / 3)
    assert summary["source"] == "simulated"


def test_regret_is_against_the_better_fixed_choice():
    found = regret([result("always", row(2.0)), result("never", row(1.0)), result("static", row(1.5))])
    assert found == {"always": 2.0, "never": 1.0, "static": 1.5}


def test_no_request_at_all_is_a_result_too():
    summary = simulate(scenario(seconds=0.001), "always").summary()
    assert (summary["requests"], summary["ttft_mean"], summary["good"]) == (0, None, 0.0)


def test_every_policy_answers_every_request():
    for name in POLICIES:
        found = simulate(scenario(seconds=40), name).summary()
        assert found["unanswered"] == 0
        assert found["requests"] > 80
