"""The switchback: order of blocks, the ratio with its interval, and when it says nothing."""

import math
import random

import pytest

from guard.control.switchback import OFF, ON, Block, effect, order


def blocks(ratios: list[float], n: int = 50) -> list[Block]:
    return [
        Block(pair=pair, arm=arm, n=n, ttft=0.3 * (ratio if arm == ON else 1.0))
        for pair, ratio in enumerate(ratios)
        for arm in (OFF, ON)
    ]


def test_every_pair_has_both_arms_in_an_order_that_the_seed_fixes() -> None:
    found = order(200, random.Random(7))
    assert found == order(200, random.Random(7))
    firsts = [arm for _, arm in found[::2]]
    assert all({found[i][1], found[i + 1][1]} == {ON, OFF} for i in range(0, 400, 2))
    assert 70 < firsts.count(ON) < 130


def test_ratio_and_interval_by_hand() -> None:
    found = effect(blocks([0.5, 0.5 * math.e**0.1, 0.5 * math.e**-0.1]))
    assert found.ratio == pytest.approx(0.5)
    # sd of the logs 0.1, t of two degrees of freedom 4.303
    assert found.high == pytest.approx(0.5 * math.exp(4.303 * 0.1 / math.sqrt(3)), rel=1e-3)
    assert (found.pairs, found.requests, found.verdict) == (3, 300, "helps")
    assert effect(blocks([2.0, 2.1, 1.9])).verdict == "hurts"


def test_too_few_pairs_or_requests_say_nothing() -> None:
    assert effect(blocks([0.5, 0.5])).verdict == "insufficient data"
    thin = effect(blocks([0.5, 0.5, 0.5], n=9))
    assert (thin.ratio, thin.pairs) == (None, 0)
    assert "at least 3 pairs" in thin.reason
    assert effect([]).ratio is None
    assert effect([Block(pair=0, arm=ON, n=50, ttft=None)]).ratio is None


def test_the_interval_covers_the_truth_and_no_effect_is_seldom_claimed() -> None:
    rng = random.Random(3)
    claimed = covered = 0
    for _ in range(1000):
        found = effect(blocks([rng.lognormvariate(0.0, 0.2) for _ in range(8)]))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
        claimed += found.verdict in ("helps", "hurts")
    assert 930 <= covered <= 970
    assert claimed == 1000 - covered
