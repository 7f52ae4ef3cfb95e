"""Cases from the field, reduced to their published figures: the right answer for each."""

import random

import pytest

MS = 1e-3


def noisy(rng, value, spread=0.05):
    return value * rng.lognormvariate(0.0, spread)


# -- A1: RTT swept over a Redis tier (figures of the sweep behind LMCache issue 1639: Qwen3-0.6B)

SWEEP = {0: 13.333, 10: 23.464, 20: 34.723, 30: 47.751, 40: 60.235, 50: 72.278}  # RTT in ms -> TTFT p50 in ms
LINK_RTT = 0.1 * MS  # of the unloaded link, under the sweep's delay


@pytest.fixture(scope="module")
def sweep(request_of, pool_of):
    rng, records = random.Random(1), []
    for delay, ttft in SWEEP.items():
        for _ in range(50):
            number = len(records)
            fetch = noisy(rng, ttft * MS) - 12.0 * MS
            if number == 0:
                fetch = 2.08  # the warm-up request of the report
            records.append(
                request_of(
                    number,
                    prompt=140,
                    matched=128,
                    lookup=0.2 * MS,
                    fetch=max(fetch, 0.05 * MS),
                    prefill=11.8 * MS,
                    rtt=LINK_RTT + delay * MS,
                )
            )
    records += [
        request_of(1000 + i, prompt=140, lookup=0.2 * MS, prefill=noisy(rng, 30 * MS), rtt=LINK_RTT) for i in range(30)
    ]
    return pool_of(records)


def test_a1_a_straight_sweep_has_its_slope_no_knee_and_is_due_to_rtt(sweep):
    assert sweep.serial_round_trips.value == pytest.approx(1.195, abs=0.05)
    assert sweep.verdict.shape == "no-knee"
    assert sweep.verdict.cause == "rtt"
    assert sweep.knee.value is None


def test_a1_departure_is_one_millisecond_above_the_floor_and_the_warm_up_moves_nothing(sweep):
    above = sweep.departure.value - sweep.rtt_floor
    assert above == pytest.approx(1.0 * MS, rel=0.35)
    assert sweep.departure.low - sweep.rtt_floor < 1.1 * MS < sweep.departure.high - sweep.rtt_floor
    assert sweep.departure.source == "measured"


# -- A2: concurrency swept, RTT constant (report R2, CC-BY-4.0, see NOTICE): 29.8K tokens, 7.15 GB per session ---------


def test_a2_concurrency_at_constant_rtt_is_bandwidth_and_says_nothing_about_rtt(request_of, pool_of):
    rng, records = random.Random(2), []
    for concurrency, ttft in ((8, 7.53), (16, 11.85), (32, 26.35)):
        for _ in range(60):
            records.append(
                request_of(
                    len(records),
                    prompt=29_800,
                    matched=29_696,
                    fetch=noisy(rng, ttft - 0.2),
                    lookup=0.05,
                    prefill=0.15,
                    rtt=30e-6,
                    running=concurrency,
                    inflight=concurrency,
                    size=7_150_000_000,
                )
            )
    cell = pool_of(records)
    assert cell.verdict.cause in ("bandwidth", "queue")
    for figure in (cell.departure, cell.break_even):
        assert figure.source == "prior"
        assert figure.reason.startswith("insufficient-data")
    assert cell.knee.value is None
    assert cell.verdict.shape == "insufficient-data"
    assert cell.seconds_per_token.value > 0.0


# -- A3, A5: hits slower than misses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hit", "miss", "reads"), [(20.24, 7.67, 6), (40.0, 0.9, 4), (40.0, 0.9, 30)], ids=["A3", "A5 at once", "A5"]
)
def test_a3_a5_hits_slower_than_recomputing_are_harmful(request_of, pool_of, hit, miss, reads):
    rng, records = random.Random(3), []
    for number in range(reads):
        records.append(
            request_of(
                number,
                prompt=20_000,
                matched=19_968,
                lookup=0.05,
                fetch=noisy(rng, hit - 0.1),
                prefill=0.05,
                rtt=MS,
            )
        )
        records.append(request_of(100 + number, prompt=20_000, lookup=0.05, prefill=noisy(rng, miss - 0.05), rtt=MS))
    cell = pool_of(records)
    assert cell.verdict.state == "harmful"
    assert cell.net_cost.low > 0.0
    assert cell.remote_now.value == pytest.approx(hit, rel=0.1)
    assert cell.saved.value == pytest.approx(miss, rel=0.15)
    assert "costs" in cell.verdict.reason


def test_a3_the_other_way_round_is_not_harmful(request_of, pool_of):
    rng, records = random.Random(3), []
    for number in range(30):
        records.append(
            request_of(number, prompt=20_000, matched=19_968, fetch=noisy(rng, 7.6), lookup=0.05, prefill=0.05, rtt=MS)
        )
        records.append(request_of(100 + number, prompt=20_000, lookup=0.05, prefill=noisy(rng, 20.2), rtt=MS))
    assert pool_of(records).verdict.state == "ok"


# -- A4: a hit that carries nothing ------------------------------------------------------------------------------------


def test_a4_hits_of_three_tokens_lose_and_the_least_tokens_are_named(request_of, pool_of):
    """14,771-token prompts at 0.1 ms a token; a lookup of 0.6 s costs 6,000 tokens, whatever it finds."""
    rng, records = random.Random(4), []
    for number in range(80):
        tokens = 3 if number % 2 else rng.randrange(4_000, 14_000)
        rest = (14_771 - tokens) * 1e-4
        records.append(
            request_of(
                number,
                prompt=14_771,
                matched=tokens,
                lookup=noisy(rng, 0.6),
                fetch=noisy(rng, 5 * MS),
                prefill=noisy(rng, rest),
                rtt=MS,
            )
        )
        records.append(
            request_of(200 + number, prompt=14_771, lookup=noisy(rng, 0.6), prefill=noisy(rng, 1.4771), rtt=MS)
        )
    cell = pool_of(records)
    assert cell.lookup_cost.value == pytest.approx(0.6, rel=0.05)
    assert cell.lookup_cost.n == 80
    assert cell.least_tokens.value == pytest.approx(6_000, rel=0.15)
    only = pool_of([record for record in records if record.tokens_matched in (0, 3)])
    assert only.verdict.state == "harmful"


# -- A10: TTFT rises with the hit rate, the cause is queueing ----------------------------------------------------------


def test_a10_rising_ttft_that_waits_in_queues_is_not_blamed_on_rtt(request_of, pool_of):
    rng, records = random.Random(10), []
    for number in range(400):
        up = number / 400
        records.append(
            request_of(
                number,
                matched=1024,
                lookup=5 * MS,
                fetch=noisy(rng, 0.3),
                prefill=noisy(rng, 0.25),
                queue=noisy(rng, 2.0 + up * 3.6),
                running=int(8 + 20 * up),
                rtt=noisy(rng, (1.0 + up) * MS),
            )
        )
        if number % 3 == 0:
            records.append(
                request_of(1000 + number, lookup=5 * MS, prefill=noisy(rng, 0.5), queue=2.0, rtt=MS, at=number)
            )
    cell = pool_of(sorted(records, key=lambda record: record.arrival_ns))
    assert cell.verdict.cause == "queue"
    assert cell.verdict.shape != "knee"
    assert cell.verdict.state != "departed"


# -- A14: counts that cannot be ----------------------------------------------------------------------------------------


def test_a14_records_with_clamped_counts_move_no_figure(request_of, pool_of):
    rng = random.Random(14)
    good = [request_of(n, matched=1024, lookup=MS, fetch=noisy(rng, 20 * MS), rtt=MS) for n in range(60)]
    good += [request_of(100 + n, lookup=MS, prefill=0.2, rtt=MS) for n in range(30)]
    bad = [
        request_of(500 + n, matched=2000, lookup=MS, fetch=5.0, rtt=MS, clamped=("kvguard.tokens.local",))
        for n in range(60)
    ]
    assert pool_of(good + bad) == pool_of(good)


# -- A17: TTFT falls while whole requests take longer ------------------------------------------------------------------


def test_a17_a_shorter_ttft_with_a_longer_total_is_said(request_of, pool_of):
    rng, records = random.Random(17), []
    for number in range(60):
        records.append(
            request_of(
                number, matched=1900, lookup=0.01, fetch=noisy(rng, 4.0), prefill=0.19, rtt=MS, e2e=noisy(rng, 152.0)
            )
        )
        records.append(request_of(100 + number, lookup=0.01, prefill=noisy(rng, 31.5), rtt=MS, e2e=noisy(rng, 99.0)))
    reason = pool_of(records).verdict.reason
    assert "TTFT falls from 31" in reason
    assert "1.5" in reason
    assert "TPOT" in reason


def test_a17_a_shorter_ttft_with_a_shorter_total_is_not(request_of, pool_of):
    rng, records = random.Random(17), []
    for number in range(60):
        records.append(
            request_of(
                number, matched=1900, lookup=0.01, fetch=noisy(rng, 4.0), prefill=0.19, rtt=MS, e2e=noisy(rng, 75.0)
            )
        )
        records.append(request_of(100 + number, lookup=0.01, prefill=noisy(rng, 31.5), rtt=MS, e2e=noisy(rng, 99.0)))
    assert "TPOT" not in pool_of(records).verdict.reason


# -- A19: two identical runs differ by 5 % -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a19_runs_that_differ_by_five_percent_trip_nothing(request_of, pool_of, seed):
    rng, records = random.Random(seed), []
    for run, level in ((0, 1.0), (1, 1.05)):
        for number in range(200):
            at, rtt = run * 200 + number, noisy(rng, 0.5 * MS, 0.05)
            if number % 3:
                records.append(
                    request_of(
                        at,
                        matched=1500,
                        lookup=2 * MS,
                        fetch=noisy(rng, 50 * MS * level),
                        rtt=rtt,
                        prefill=noisy(rng, 50 * MS * level),
                    )
                )
            else:
                records.append(request_of(at, lookup=2 * MS, prefill=noisy(rng, 0.2 * level), rtt=rtt))
    cell = pool_of(records)
    assert cell.verdict.state == "ok"
    assert cell.verdict.shape == "insufficient-data"
    assert cell.departure.source == "prior"
