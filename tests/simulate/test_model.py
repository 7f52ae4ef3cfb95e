import random

import pytest

from guard.simulate import model


def test_prefill_follows_the_formula():
    a, b, d = model.PREFILL
    assert model.prefill_seconds(4000, 4000) == pytest.approx(a + b * 4000 + d * 4000 * 2000)
    assert model.prefill_seconds(4000, 100) == pytest.approx(a + b * 100 + d * 100 * 3950)
    assert model.prefill_seconds(8000, 100) > model.prefill_seconds(4000, 100)  # attention looks back


def test_round_trip_swings_between_its_bounds_and_starts_low():
    values = [model.rtt_seconds(at, 0) for at in range(int(model.RTT_PERIOD))]
    assert min(values) == values[0] == pytest.approx(model.RTT_LOW)
    assert max(values) == pytest.approx(model.RTT_HIGH, rel=0.01)
    assert model.rtt_seconds(0.0, 1) != model.rtt_seconds(0.0, 0)


def test_link_sends_one_transfer_after_the_other():
    link = model.Link(bytes_per_second=100.0)
    assert link.transfer(0.0, 100) == 1.0
    assert link.transfer(0.5, 50) == 1.5  # waits for the first
    assert link.transfer(9.0, 100) == 10.0  # idle in between


def test_cache_holds_whole_units_and_never_all_of_a_prompt():
    cache = model.PrefixCache(10_000, unit=256)
    assert cache.matched(1, 1000) == 0
    assert cache.put(1, 1000) == 768
    assert cache.put(1, 1100) == 256
    assert cache.put(1, 1100) == 0
    assert cache.matched(1, 5000) == 1024
    assert cache.matched(1, 1024) == 768


def test_cache_drops_what_was_not_used_for_longest():
    cache = model.PrefixCache(300, unit=100)
    for conversation in (1, 2, 3):
        cache.put(conversation, 100)
    cache.matched(1, 200)
    cache.put(4, 100)
    assert [cache.matched(conversation, 200) for conversation in (1, 2, 3, 4)] == [100, 0, 100, 100]


def test_conversations_grow_and_stay_in_bounds():
    users = model.Conversations(random.Random(1), active=5)
    lengths: dict[int, int] = {}
    grown = 0
    assert [conversation for conversation, _ in users.histories()] == [1, 2, 3, 4, 5]
    for _ in range(2000):
        prompt = users.next()
        assert 0 < prompt.tokens <= model.LONGEST_PROMPT
        assert prompt.output >= 1
        if prompt.conversation in lengths:
            assert prompt.tokens > lengths[prompt.conversation]
            grown += 1
        lengths[prompt.conversation] = prompt.tokens
    assert grown > 1000
    assert len(lengths) > 100
