"""Targets, samples and their statistics."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.errors import ConfigError
from guard.probe import registry
from guard.probe.prober import Sample, Target, summarize


def test_statistics_of_known_values():
    summary = summarize([Sample(rtts=(1.0, 3.0), sent=2), Sample(rtts=(2.0,), sent=2, problem="late")])
    assert (summary.n, summary.sent, summary.loss) == (3, 4, 0.25)
    assert (summary.p50, summary.minimum, summary.jitter) == (2.0, 1.0, 1.5)
    assert summary.p99 == pytest.approx(2.98)
    assert (summary.p50_low, summary.p50_high) == (None, None)


def test_nothing_answered_is_all_lost_and_nothing_sent_is_no_loss():
    assert summarize([Sample(sent=2)]).loss == 1.0
    assert summarize([Sample(problem="no live connection")]).loss is None
    assert summarize([]).p50 is None


def test_the_interval_of_the_median_holds_it_as_often_as_it_says():
    rng = random.Random(7)
    held = 0
    for _ in range(2000):
        summary = summarize([Sample(rtts=tuple(rng.lognormvariate(0, 1) for _ in range(40)), sent=40)])
        assert summary.p50_low is not None
        assert summary.p50_high is not None
        held += summary.p50_low <= 1.0 <= summary.p50_high
    assert 0.94 <= held / 2000 <= 0.985


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50))
def test_order_of_the_statistics(values):
    summary = summarize([Sample(rtts=tuple(values), sent=len(values))])
    assert summary.minimum is not None
    assert summary.p50 is not None
    assert summary.p99 is not None
    assert min(values) == summary.minimum <= summary.p50 <= summary.p99 <= max(values) + 1e-12
    if summary.p50_low is not None and summary.p50_high is not None:
        assert summary.p50_low <= summary.p50 <= summary.p50_high
    assert summary.loss == 0.0
    assert math.isfinite(summary.jitter or 0.0)


@pytest.mark.parametrize(
    ("target", "key", "text"),
    [
        (Target(target="h:1", prober="pong"), "prober", "not one of .*resp"),
        (Target(target="h:1", prober="resp", options={"pasword_file": "x"}), "pasword_file", "unknown key for prober"),
        (Target(target="h:1", prober="resp", options={"password_file": 3}), "password_file", "not text"),
        (Target(target="h:1", prober="resp", options={"password_file": "/nowhere"}), "password_file", "No such file"),
        (Target(target="ftp://h:1", prober="resp"), "target", "not an address"),
        (Target(target="redis://u:pw@h:1", prober="resp"), "target", "holds a password"),
        (Target(target="h:99999", prober="resp"), "target", "99999|range"),
        (Target(target="h", prober="resp"), "target", "takes host:port"),
    ],
)
def test_what_cannot_be_used_names_the_key(target, key, text):
    with pytest.raises(ConfigError, match=text) as caught:
        registry.make(target)
    assert caught.value.key == key
    assert "pw" not in str(caught.value).replace("password", "").replace("pasword", "")
