"""The metrics: values, bounds, and that every series of the contract is there."""

from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from benchmarks import scrape
from guard import semconv
from guard.metrics import IDLE_SECONDS, LABEL_LIMITS, SCRAPE_SAMPLES, Telemetry
from guard.wire import FetchRecord, RequestRecord


class Turned:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Turned:
    return Turned()


@pytest.fixture
def telemetry(clock: Turned) -> Telemetry:
    return Telemetry(clock)


def record(**more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "internal_id": "i", "request_id": "r", "trace_id": "t", "span_id": "s", "engine_id": "h:8000/0", "model": "m",
        "backend": "a/b", "class_": "4k/low", "arrival_ns": 0, "prompt_tokens": 100, "tokens_local": 0,
        "tokens_matched": 64, "tokens_loaded": 64, "tokens_computed": 36, "ttft": 0.5, "intake": 0.0, "queue": 0.1,
        "lookup": 0.02, "slot": 0.01, "fetch": 0.2, "resume": 0.0, "prefill": 0.17, "residual": -0.003,
        "exposed_wait": 0.23, "decision": "remote", "reason": "open",
        "fetches": [FetchRecord(span_id="f", attempt=1, start_ns=0, seconds=0.2, outcome="ok", bytes=1000)],
    } | more  # fmt: skip
    return RequestRecord(**fields)


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in telemetry.collect()
        for sample in family.samples
    }


def total(telemetry: Telemetry, name: str, **labels: str) -> float:
    return sum(
        value
        for (sample, pairs), value in samples(telemetry).items()
        if sample == name and labels.items() <= dict(pairs).items()
    )


def test_one_request_in_every_metric(telemetry: Telemetry) -> None:
    telemetry.observe(record())
    per_backend = {"model_name": "m", "engine_id": "h:8000/0", "backend": "a/b", "class": "4k/low"}
    for name, value in (
        ("kvguard_ttft_seconds_sum", 0.5),
        ("kvguard_kv_fetch_duration_seconds_sum", 0.2),
        ("kvguard_kv_lookup_duration_seconds_sum", 0.02),
        ("kvguard_kv_miss_latency_seconds_sum", 0.23),
        ("kvguard_kv_exposed_wait_seconds_sum", 0.23),
        ("kvguard_kv_fetch_bytes_total", 1000.0),
    ):
        assert total(telemetry, name, **per_backend) == pytest.approx(value), name
    assert total(telemetry, "kvguard_ttft_residual_seconds_sum") == pytest.approx(0.003)
    assert total(telemetry, "kvguard_decisions_total", decision="remote", reason="open") == 1


def test_a_value_on_an_edge_falls_into_its_bucket_and_sla_bounds_are_edges(telemetry: Telemetry) -> None:
    for ttft in (0.2, 0.5, 2.0, 2.0001):
        telemetry.observe(record(ttft=ttft))
    edges = ("0.1", "0.2", "0.5", "2.0", "3.0", "+Inf")
    buckets = [total(telemetry, "kvguard_ttft_seconds_bucket", le=edge) for edge in edges]
    assert buckets == [0, 1, 2, 3, 4, 4]


def test_what_does_not_count(telemetry: Telemetry) -> None:
    telemetry.observe(record(ttft=None, aborted=True, fetches=[], lookup=0.0, residual=None))
    failed = FetchRecord(span_id="f", attempt=1, start_ns=0, seconds=0.3, outcome="failed", bytes=1000)
    telemetry.observe(record(ttft=float("nan"), residual=None, fetches=[failed]))
    assert total(telemetry, "kvguard_ttft_seconds_count") == 0
    assert total(telemetry, "kvguard_kv_lookup_duration_seconds_count") == 1
    assert total(telemetry, "kvguard_kv_fetch_bytes_total") == 0
    assert total(telemetry, "kvguard_kv_fetch_duration_seconds_count", outcome="failed") == 1
    assert total(telemetry, "kvguard_decisions_total") == 2


def test_openmetrics_says_the_same(telemetry: Telemetry) -> None:
    telemetry.observe(record())
    telemetry.observe(record(model='a"b\\c', ttft=7.5))
    parsed = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in openmetrics_families(telemetry.render(openmetrics=True).decode())
        for sample in family.samples
    }
    assert parsed == samples(telemetry)
    assert total(telemetry, "kvguard_ttft_seconds_count", model_name='a"b\\c') == 1


def exemplars(telemetry: Telemetry, name: str) -> dict[str, tuple[str, float, float]]:
    found = {
        sample.labels["le"]: sample.exemplar
        for family in openmetrics_families(telemetry.render(openmetrics=True).decode())
        for sample in family.samples
        if sample.name == f"{name}_bucket" and sample.exemplar
    }
    return {edge: (one.labels["trace_id"], one.value, float(one.timestamp)) for edge, one in found.items()}


def test_exemplars_name_the_trace_of_the_last_value_in_a_bucket(telemetry: Telemetry) -> None:
    telemetry.observe(record(trace_id="a" * 32))
    telemetry.observe(record(trace_id="b" * 32, ttft=0.45, arrival_ns=7_000_000_000))
    telemetry.observe(record(trace_id="c" * 32, ttft=3.5, arrival_ns=8_000_000_000))
    assert exemplars(telemetry, "kvguard_ttft_seconds") == {
        "0.5": ("b" * 32, 0.45, 7.45), "5.0": ("c" * 32, 3.5, 11.5),
    }  # fmt: skip
    assert exemplars(telemetry, "kvguard_kv_fetch_duration_seconds") == {"0.2": ("c" * 32, 0.2, 0.2)}
    assert "trace_id" not in telemetry.render().decode()


@pytest.mark.parametrize("trace_id", ["", "x" * 65, 'a"} 1', "é"])
def test_a_trace_id_that_is_none_makes_no_exemplar(telemetry: Telemetry, trace_id: str) -> None:
    telemetry.observe(record(trace_id=trace_id))
    assert exemplars(telemetry, "kvguard_ttft_seconds") == {}
    assert total(telemetry, "kvguard_ttft_seconds_count") == 1


def test_every_metric_is_exposed_with_its_type_and_help(telemetry: Telemetry) -> None:
    families = {family.name: family for family in telemetry.collect()}
    for metric in semconv.METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_labels_are_bounded_whatever_comes(telemetry: Telemetry) -> None:
    for number in range(1500):
        telemetry.observe(
            record(
                model=f"m{number}", engine_id=f"e{number}", backend=f"b{number}", class_=f"c{number}",
                decision=f"d{number}", reason=f"r{number}",
            )
        )  # fmt: skip
    values: dict[str, set[str]] = {}
    series = 0
    for family in telemetry.collect():
        for sample in family.samples:
            series += 1
            for name, value in sample.labels.items():
                values.setdefault(name, set()).add(value)
    assert series < SCRAPE_SAMPLES
    for name, limit in LABEL_LIMITS.items():
        assert len(values.get(name, ())) <= limit + 1, name
    assert total(telemetry, "kvguard_ttft_seconds_count") == 1500


def test_what_finds_no_room_is_folded_over_engines_first(telemetry: Telemetry) -> None:
    for number in range(900):
        telemetry.observe(record(engine_id=f"e{number}", backend=f"b{number % 3}"))
    assert [total(telemetry, "kvguard_ttft_seconds_count", backend=f"b{n}") for n in range(3)] == [300] * 3
    found = samples(telemetry)
    by_engine = {
        dict(pairs)["engine_id"]: n for (name, pairs), n in found.items() if name == "kvguard_ttft_seconds_count"
    }
    assert by_engine["e0"] == 1
    assert "e899" not in by_engine


def test_gauges_leave_less_for_histograms_and_series_end_rather_than_jump(clock: Turned) -> None:
    gauges: list[Any] = []
    telemetry = Telemetry(clock, lambda: gauges)
    for number in range(300):
        telemetry.observe(record(engine_id=f"e{number}"))
    own = len([key for key in samples(telemetry) if key[0] == "kvguard_ttft_seconds_count"])
    for metric in (semconv.KV_FETCH_INFLIGHT, semconv.KV_FETCH_OLDEST_AGE, semconv.CONTROLLER_STATE):
        more = ("open",) if metric is semconv.CONTROLLER_STATE else ()
        gauges += [(metric, ("m", f"e{n % 1000}", f"b{n // 1000}", *more), 1.0) for n in range(4000)]
    gauges += [(semconv.OFFLOAD_MODE, ("m", f"e{n % 1000}", f"b{n // 1000}", "on"), 1.0) for n in range(4000)]
    gauges += [(semconv.SLA_ATTAINABLE, ("m", f"e{n % 1000}", f"b{n // 1000}"), 1.0) for n in range(4000)]
    telemetry.render()
    telemetry.forget_idle()
    assert len(samples(telemetry)) < SCRAPE_SAMPLES
    left = len([key for key in samples(telemetry) if key[0] == "kvguard_ttft_seconds_count"])
    assert 10 < left < own
    before = total(telemetry, "kvguard_ttft_seconds_count", engine_id="other")
    for number in range(300):
        telemetry.observe(record(engine_id=f"e{number}"))
    assert 0 < total(telemetry, "kvguard_ttft_seconds_count", engine_id="other") - before <= 300


def test_gauges_past_their_limit_are_summed_or_the_worst_is_kept(clock: Turned) -> None:
    numbers = range(6000)
    telemetry = Telemetry(
        clock,
        lambda: [
            *((semconv.KV_FETCH_INFLIGHT, ("m", f"e{n % 1000}", f"b{n // 1000}"), 1.0) for n in numbers),
            *((semconv.KV_FETCH_OLDEST_AGE, ("m", f"e{n % 1000}", f"b{n // 1000}"), float(n)) for n in numbers),
            *((semconv.SLA_ATTAINABLE, ("m", f"e{n % 1000}", f"b{n // 1000}"), float(n != 5999)) for n in numbers),
        ],
    )  # fmt: skip
    assert total(telemetry, "kvguard_kv_fetch_inflight") == 6000
    found = samples(telemetry)
    folded = (("backend", "b5"), ("engine_id", "other"), ("model_name", "m"))
    assert found["kvguard_kv_fetch_oldest_age_seconds", folded] == 5999
    assert found["kvguard_sla_attainable", folded] == 0
    assert len([key for key in found if key[0] == "kvguard_kv_fetch_inflight"]) <= 4096 + 6


def test_one_value_of_a_histogram_that_is_no_request(telemetry: Telemetry) -> None:
    for value in (0.0002, -1.0, float("nan"), float("inf")):
        telemetry.observe_value(semconv.RTT_SECONDS, "resp", "redis:6379", value=value)
    assert total(telemetry, "kvguard_rtt_seconds_bucket", le="0.0002") == 1
    assert total(telemetry, "kvguard_rtt_seconds_count", prober="resp", target="redis:6379") == 1


@pytest.mark.parametrize("value", ["x" * 257, "a\nb", "\x00"])
def test_a_value_that_is_no_label_is_other(telemetry: Telemetry, value: str) -> None:
    telemetry.observe(record(model=value))
    assert total(telemetry, "kvguard_ttft_seconds_count", model_name="other") == 1


def test_idle_labels_make_room_and_their_series_go(telemetry: Telemetry, clock: Turned) -> None:
    for number in range(LABEL_LIMITS["backend"] + 1):
        telemetry.observe(record(backend=f"b{number}"))
    assert total(telemetry, "kvguard_ttft_seconds_count", backend="other") == 1
    clock.now += IDLE_SECONDS + 1
    telemetry.observe(record(backend="b0"))
    telemetry.forget_idle()
    telemetry.observe(record(backend="new"))
    assert total(telemetry, "kvguard_ttft_seconds_count", backend="new") == 1
    assert total(telemetry, "kvguard_ttft_seconds_count", backend="b0") == 2
    assert total(telemetry, "kvguard_ttft_seconds_count", backend="b1") == 0


def test_a_fetch_that_came_late_is_counted_once(telemetry: Telemetry) -> None:
    one = record()
    telemetry.observe(one)
    one.fetches.append(FetchRecord(span_id="g", attempt=2, start_ns=0, seconds=90.0, outcome="ok", bytes=500))
    for _ in range(2):
        telemetry.amend(one)
    assert total(telemetry, "kvguard_kv_fetch_duration_seconds_count") == 2
    assert total(telemetry, "kvguard_kv_fetch_duration_seconds_sum") == pytest.approx(90.2)
    assert total(telemetry, "kvguard_kv_fetch_bytes_total") == 1500
    assert total(telemetry, "kvguard_decisions_total") == 1


def test_hook_totals_never_fall_and_count_nothing_twice(telemetry: Telemetry) -> None:
    def tell(pid: str, dropped: object, errors: object = 0) -> tuple[float, float]:
        telemetry.hook_totals("e", (pid,), {semconv.RECORDS_DROPPED: dropped, semconv.HOOK_ERRORS: errors})  # type: ignore[dict-item]
        return (
            total(telemetry, "kvguard_hook_records_dropped_total", engine_id="e"),
            total(telemetry, "kvguard_hook_errors_total", engine_id="e"),
        )

    assert tell("1", 3, 1) == (3, 1)
    assert tell("1", 3, 1) == (3, 1)
    assert tell("1", 10, 2) == (10, 2)
    assert tell("2", 4) == (14, 2)
    assert tell("1", 2, 0) == (16, 2)  # process 1 began anew
    for absurd in (-5, "x", True, 1.5, None):
        assert tell("1", absurd, absurd) == (16, 2)
    telemetry.hook_totals("silent", ("1",), {})
    assert total(telemetry, "kvguard_hook_records_dropped_total", engine_id="silent") == 0


def test_a_running_total_kept_elsewhere(telemetry: Telemetry) -> None:
    for value in (3, 3, 9):
        telemetry.set_total(semconv.INGEST_ORPHANS, "kv.fetch", value=value)
    assert total(telemetry, "kvguard_ingest_orphans_total", kind="kv.fetch") == 9


def test_gauges_are_asked_at_every_scrape(clock: Turned) -> None:
    telemetry = Telemetry(clock, lambda: [(semconv.JOIN_PENDING, (), clock.now)])
    assert total(telemetry, "kvguard_join_pending_requests") == 1000
    clock.now = 1001
    assert total(telemetry, "kvguard_join_pending_requests") == 1001


def test_every_value_of_the_fixed_lists_has_room(telemetry: Telemetry) -> None:
    """A label is bounded over all metrics that carry it: the fixed lists of all of them must fit together."""
    outcomes = (
        *semconv.OUTCOMES, "accepted", "rejected", "ignored", "sent", "dropped", "met", "missed", "written", "lost",
    )  # fmt: skip
    for outcome in outcomes:
        telemetry.count(semconv.INGEST_SPANS, outcome)
    telemetry.count(semconv.PROBES_TOTAL, "resp", "t", "failed")
    for kind in (*semconv.EVENT_KINDS, "request", "kv.lookup", "kv.fetch", "kv.load", "kv.read", "kv.store", "decode"):
        telemetry.count(semconv.EVENTS_TOTAL, kind)
    for metric in ("kvguard_ingest_spans_total", "kvguard_probes_total", "kvguard_events_total"):
        assert "other" not in {
            value for (name, labels), _ in samples(telemetry).items() if name == metric for _, value in labels
        }


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_thousand_engines_with_four_backends_each(openmetrics: bool) -> None:
    """The time that this takes is what `python -m benchmarks scrape` prints."""
    text = scrape.fleet().render(openmetrics=openmetrics).decode()
    assert len(text.encode()) <= scrape.GOAL_BYTES
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) <= SCRAPE_SAMPLES
    for name, count in (
        ("kvguard_engine_info", 1000), ("kvguard_directive_age_seconds", 1000), ("kvguard_controller_state", 4000),
        ("kvguard_offload_mode", 4000), ("kvguard_kv_fetch_oldest_age_seconds", 4000),
    ):  # fmt: skip
        assert len([line for line in series if line.startswith(name + "{")]) == count
    counts = [line for line in series if line.startswith("kvguard_ttft_seconds_count")]
    assert sum(float(line.rpartition(" ")[2]) for line in counts) == 24_000
