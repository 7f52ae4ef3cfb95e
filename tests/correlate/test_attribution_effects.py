"""Direct and total effect of miss latency on TTFT, and waits for one shared load."""

import numpy as np
import pytest

from guard import semconv as s
from guard.correlate.attribution import report
from guard.correlate.attribution_convoys import convoys
from guard.correlate.attribution_effects import effects
from guard.correlate.frame import frame
from guard.correlate.join import Joiner
from guard.correlate.window import Window


@pytest.fixture
def frame_of(spans):
    def make(rows):
        joiner, window = Joiner(), Window()
        for number, row in enumerate(rows):
            start = row.pop("start", float(number))
            fetch = row.pop("batch", None)
            made = spans.one(number, start, **{"server": 0, "ranks": 1, "reads": 0, **row})
            for span in made:
                if fetch and span.name == s.SPAN_FETCH:
                    span.attributes[s.BATCH] = fetch
            joiner.add({}, made, 0)
        for record in joiner.advance(20 * 10**9):
            window.add(record)
        return frame(window)

    return make


def parts(fetch, prefill=0.1, queue=0.02, **more):
    return {
        s.TIME_FETCH: fetch, s.TIME_PREFILL: prefill, s.TIME_QUEUE: queue,
        s.TTFT: 0.01 + queue + 0.03 + 0.04 + fetch + 0.05 + prefill, **more,
    }  # fmt: skip


def test_longer_prompts_are_not_taken_for_the_effect_of_miss_latency(frame_of):
    """Both grow with the prompt; a second of miss latency is a second of TTFT all the same."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(300):
        prompt = int(rng.integers(1200, 4000))
        rows.append(parts(
            prompt * 1e-4 * float(rng.lognormal(0, 0.2)), prompt * 3e-4 * float(rng.lognormal(0, 0.05)),
            **{s.INPUT_TOKENS: prompt, s.TOKENS_COMPUTED: prompt - 1280},
        ))  # fmt: skip
    frame = frame_of(rows)
    raw = np.polyfit(frame["miss_latency"].to_numpy(), frame["ttft"].to_numpy(), 1)[0]
    found = effects(frame)
    assert raw > 2.0
    for kind in ("direct", "total"):
        assert found[kind]["low"] < 1.0 < found[kind]["high"]
        assert found[kind]["value"] == pytest.approx(1.0, abs=0.15)


def test_queues_made_by_slow_reads_are_in_the_total_effect_only(frame_of):
    rng = np.random.default_rng(2)
    rows = []
    for _ in range(300):
        fetch = float(rng.gamma(4.0, 0.05))
        rows.append(parts(fetch, 0.1 * float(rng.lognormal(0, 0.1)), queue=0.5 * fetch + float(rng.uniform(0, 0.02))))
    found = effects(frame_of(rows))
    assert found["direct"]["value"] == pytest.approx(1.0, abs=0.1)
    assert found["total"]["value"] == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(("n", "note"), [(59, "insufficient-data: 59 of 60"), (80, "insufficient-data: no variation")])
def test_too_little_tells_nothing(frame_of, n, note):
    found = effects(frame_of([parts(0.1) for _ in range(n)]))
    assert found["note"].startswith(note)
    assert found["direct"] is None


# -- A11: 10K tokens of shared prefix, fifty clients: all wait for one load --------------------------------------------


def test_a11_a_convoy_behind_one_load_is_attributed_to_it(frame_of):
    """The first begins a load of 2 s; 49 more come while it runs and end with it. Ten others read on their own."""
    rows = [{"start": 0.0, **parts(2.0)}]
    rows += [{"start": 0.03 * n, **parts(2.0 - 0.03 * n)} for n in range(1, 50)]
    rows += [{"start": 100.0 + 10 * n, **parts(0.3)} for n in range(10)]
    found = convoys(frame_of(rows))
    assert (found["loads"], found["n"]) == (1, 50)
    (one,) = found["largest"]
    assert one["kind"] == "convoy"
    assert one["leader"] == "cmpl-0-00000000"
    assert one["load_seconds"] == pytest.approx(2.07)
    assert one["shared_wait_seconds"] == pytest.approx(sum(2.07 - 0.03 * n for n in range(50)), rel=1e-6)
    assert found["share_of_ttft"] > 0.8


def test_a_burst_of_equally_long_reads_is_no_convoy(frame_of):
    rows = [{"start": n * 1e-4, **parts(0.3)} for n in range(20)]
    rows += [{"start": 50.0 + n, **parts(0.2 + 0.01 * n)} for n in range(20)]
    assert convoys(frame_of(rows))["loads"] == 0


def test_members_of_a_synchronous_batch_wait_for_one_load(frame_of):
    rows = [{"start": n // 3 * 1.0, "batch": f"b{n // 3}", **parts(0.3)} for n in range(9)]
    found = convoys(frame_of(rows))
    assert (found["loads"], found["n"]) == (3, 9)
    assert found["largest"][0]["kind"] == "batch"
    assert found["shared_wait_seconds"] == pytest.approx(9 * 0.3)


def test_the_report_holds_both(frame_of):
    result = report(frame_of([parts(0.1 + n / 1000) for n in range(80)]), 600.0)
    assert result["correlation"][0]["effect"]["direct"]["value"] == pytest.approx(1.0, abs=0.05)
    assert result["convoys"]["source"] == "measured"
