"""Stay local, go remote, or measure: the published criteria, and measured thresholds in their place."""

import pytest

from guard.estimate.advice import Situation, advise
from guard.estimate.shapes import Figure

MS = 1e-3
PRIOR_DEPARTURE, PRIOR_EVEN = Figure(value=0.2 * MS, source="prior"), Figure(value=0.5 * MS, source="prior")
NOTHING = Figure(value=None)
DEPARTURE = Figure(value=1.5 * MS, low=1.4 * MS, high=1.6 * MS, n=900)
EVEN = Figure(value=4.7 * MS, low=4.4 * MS, high=5.1 * MS, n=900)


def ask(**more):
    given = {"rtt": MS, "departure": DEPARTURE, "break_even": EVEN, "net_cost": NOTHING}
    return advise(Situation(**(given | more)))


@pytest.mark.parametrize(
    ("rtt", "advice"), [(0.1 * MS, "remote"), (2.0 * MS, "remote"), (4.6 * MS, "measure"), (6.0 * MS, "local")]
)
def test_measured_points_decide_not_the_published_ones(rtt, advice):
    """At 2 ms the published 500 us would say local; the deployment's own break-even is 4.7 ms."""
    told = ask(rtt=rtt)
    assert told["advice"] == advice
    assert all(rule["source"] == "measured" for rule in told["rules"])


@pytest.mark.parametrize(
    ("low", "high", "rtt", "advice"),
    [
        (0.0, None, MS, "measure"),  # nothing is known of either side
        (0.0, 9 * MS, MS, "measure"),
        (None, 9 * MS, MS, "measure"),
        (4 * MS, None, 50 * MS, "measure"),
        (4 * MS, None, MS, "remote"),
        (0.0, 9 * MS, 10 * MS, "local"),
    ],
)
def test_an_open_interval_does_not_decide(low, high, rtt, advice):
    told = ask(rtt=rtt, break_even=Figure(value=5 * MS, low=low, high=high, n=50))
    (even,) = (rule for rule in told["rules"] if rule["rule"] == "break-even")
    assert (told["advice"], even["speaks_for"]) == (advice, advice)
    assert (f"({(low or 0.0) * 1e3:.3g} ms to {'open' if high is None else f'{high * 1e3:.3g} ms'})") in even["text"]


@pytest.mark.parametrize(("rtt", "expected"), [(0.03 * MS, "remote"), (0.9 * MS, "local")])
def test_priors_only_say_what_to_expect(rtt, expected):
    told = ask(rtt=rtt, departure=PRIOR_DEPARTURE, break_even=PRIOR_EVEN)
    assert (told["advice"], told["expected_by_priors"]) == ("measure", expected)
    assert {rule["source"] for rule in told["rules"]} == {"prior"}


def test_a_bound_that_remote_does_not_meet_keeps_it_local():
    assert ask(sla=0.2, remote_ttft=0.3, recompute_ttft=0.1)["advice"] == "local"
    assert ask(sla=0.2, remote_ttft=0.1, recompute_ttft=0.3)["advice"] == "remote"


def test_reads_that_lose_now_are_local_whatever_the_points_say():
    assert ask(net_cost=Figure(value=0.5, low=0.3, high=0.7, n=50))["advice"] == "local"


def test_short_prompts_stay_local_and_figures_of_a_pool_are_to_be_measured():
    least = Figure(value=6000.0, source="projected")
    assert ask(prompt_tokens=2000, least_tokens=least)["advice"] == "local"
    assert ask(prompt_tokens=20_000, least_tokens=least)["advice"] == "remote"
    assert ask(own_class=False, concurrency=1)["advice"] == "measure"
