"""Where requests wait for the GPU a read saves each of them its prefill: states, limits and trials reckon with that."""

from dataclasses import replace

import pytest

from guard.control.controller import decide
from guard.control.projection import coefficients, costs_of, min_tokens, project, saved_seconds
from guard.control.shapes import BYPASS, HALF_OPEN, OPEN, Evidence, Read, State
from tests.control.plant import CELL, MATCH, PROMPT, RECOMPUTE, TOKEN_BYTES

FAR = 0.02  # seconds of RTT: a read takes 0.7 s and saves 0.384 s of the 0.4 s


def evidence(waiting: float, *reads: Read, rtt: float = FAR) -> Evidence:
    return Evidence(cells={"all": CELL}, rtt=rtt, mix={"2k-4k/c0-4": 2.0}, waiting=waiting, reads=reads)


def read(seconds: float) -> Read:
    return Read(
        at=99.0, seconds=seconds, prompt_tokens=PROMPT, local_tokens=0, loaded_tokens=MATCH, bytes=MATCH * TOKEN_BYTES,
        tagged=True, rtt=FAR,
    )  # fmt: skip


@pytest.mark.parametrize("waiting", [0.0, 0.5, 3.0])
def test_the_ratio_of_the_roads_counts_those_who_wait(waiting: float) -> None:
    plain = coefficients(evidence(waiting))
    assert plain is not None
    costs = costs_of(plain)
    found = project(evidence(waiting), costs)
    rest = RECOMPUTE - 0.384
    took = costs.read_seconds(MATCH * TOKEN_BYTES) * costs.fetch_mean
    everybody = (1.0 + waiting) * costs.prefill_mean
    assert found.best == pytest.approx((took + everybody * rest) / (everybody * RECOMPUTE), rel=0.01)
    assert found.remote == pytest.approx(took + rest, rel=0.01)  # its own time is what is shown
    assert saved_seconds(read(took), costs, waiting) == pytest.approx((1.0 + waiting) * 0.384, rel=0.001)


@pytest.mark.parametrize(("waiting", "state"), [(0.0, BYPASS), (0.2, BYPASS), (3.0, OPEN)])
def test_reads_that_lose_on_an_idle_engine_are_not_stopped_where_they_relieve_a_queue(
    waiting: float, state: str
) -> None:
    now, held = 100.0, State(since=0.0)
    for _ in range(12):
        held, _ = decide(held, evidence(waiting), now)
        now += 0.25
    assert held.name == state


def test_a_queue_does_not_keep_reads_that_cost_more_than_it_saves() -> None:
    now, held = 100.0, State(since=0.0)
    for _ in range(12):
        held, _ = decide(held, evidence(3.0, rtt=0.1), now)  # 3.3 s for 4 x 0.384 s
        now += 0.25
    assert held.name == BYPASS


def test_a_try_is_judged_by_what_it_saved_to_everybody() -> None:
    trying = State(name=HALF_OPEN, since=90.0, reason="healed", rtt=FAR)
    assert decide(trying, evidence(0.0, read(0.9)), 100.0)[0].name == BYPASS
    assert decide(trying, evidence(2.0, read(0.9)), 100.0)[0].name == OPEN
    assert decide(trying, evidence(2.0, read(1.3)), 100.0)[0].name == BYPASS


def test_fewer_tokens_are_worth_a_read_where_requests_wait() -> None:
    far = replace(CELL, reference_tokens=40_000.0, reference_matched=39_000.0)
    plain = coefficients(replace(evidence(0.0), cells={"all": far}))
    assert plain is not None
    # 0.665 s fixed; a token saves 1e-4 s to each less 1e-5 s of bytes: 7,389 and 3,500 tokens, half of it rounded down
    found = [min_tokens(replace(evidence(waiting), cells={"all": far}), costs_of(plain)) for waiting in (0.0, 0.4, 1.1)]
    assert found == [2048, 2048, 1024]  # few that wait now and then wake no hook
