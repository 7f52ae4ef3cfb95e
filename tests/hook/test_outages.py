import random
from typing import Any

import pytest

from guard.hook.outages import Backoff, Complaints


def test_backoff_doubles_with_jitter_up_to_its_limit_and_starts_over():
    backoff = Backoff(1, first=0.1, longest=2.0, rng=random.Random(1))
    waits = [backoff.failed() for _ in range(8)]
    for wait, full in zip(waits, [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0], strict=True):
        assert full / 2 <= wait <= full
    assert waits[5] != waits[6]
    backoff.succeeded()
    assert backoff.failed() <= 0.1
    for _ in range(5000):
        assert backoff.failed() <= 2.0


def test_backoff_tries_every_endpoint_before_it_waits():
    backoff = Backoff(3, first=1.0, longest=8.0, rng=random.Random(1))
    waits = [backoff.failed() for _ in range(6)]
    assert [wait > 0 for wait in waits] == [False, False, True, False, False, True]


def test_backoff_honours_the_longest_retry_after_of_a_round():
    backoff = Backoff(2, first=0.1, longest=1.0, rng=random.Random(1))
    assert backoff.failed(9.0) == 0.0
    assert backoff.failed(None) == 9.0
    assert backoff.failed(None) == 0.0
    assert backoff.failed(None) <= 1.0


def test_complaints_are_made_once_per_kind_and_again_after_five_minutes(clock: Any, caplog: pytest.LogCaptureFixture):
    complaints = Complaints(clock)
    for _ in range(10):
        complaints.say("a", "first %d", 1)
        complaints.say("b", "second")
    assert [record.getMessage() for record in caplog.records] == ["first 1", "second"]
    clock.advance(301)
    complaints.say("a", "first %d", 2)
    assert len(caplog.records) == 3
