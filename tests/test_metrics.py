"""The metrics: values, bounds, and that every series of the contract is there."""

from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from guard import metrics as module
from guard import semconv
from guard.metrics import IDLE_SECONDS, LABEL_LIMITS, SERIES_LIMIT, Telemetry
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


def test_the_text_says_the_same(telemetry: Telemetry) -> None:
    telemetry.observe(record())
    text = generate_latest(telemetry.registry).decode()
    parsed = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert parsed == samples(telemetry)


def test_every_metric_is_exposed_with_its_type_and_help(telemetry: Telemetry) -> None:
    families = {family.name: family for family in telemetry.collect()}
    for metric in semconv.METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_labels_are_bounded_whatever_comes(telemetry: Telemetry) -> None:
    for number in range(2000):
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
    assert series < 200_000
    for name, limit in LABEL_LIMITS.items():
        assert len(values.get(name, ())) <= limit + 1, name
    assert len(telemetry._tables["kvguard_ttft_seconds"].rows) <= SERIES_LIMIT + 1
    assert sum(sum(row[:-1]) for row in telemetry._tables["kvguard_ttft_seconds"].rows.values()) == 2000


def test_the_cross_product_of_labels_is_bounded(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERIES_LIMIT", 50)
    for number in range(400):
        telemetry.observe(record(engine_id=f"e{number % 20}", backend=f"b{number // 20}"))
    assert len([key for key in samples(telemetry) if key[0] == "kvguard_ttft_seconds_count"]) == 51
    assert total(telemetry, "kvguard_ttft_seconds_count", engine_id="other", backend="other") == 350


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
