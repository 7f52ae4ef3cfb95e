"""The hook's counters on their way through vLLM's stats, with stand-ins for vLLM's two processes."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from guard.gate import Decision
from guard.hook.connector import guarded
from guard.hook.engine_metrics import FAMILIES, Families, PromMetrics, Tally, families_for
from guard.hook.engine_stats import Told
from guard.hook.runtime import Runtime
from tests.hook.fake_runtime import OFF, FakeRuntime, serve
from tests.hook.fakes_vllm import (
    SCHEDULER,
    WORKER,
    FakeBlocks,
    FakeConnector,
    FakeRequest,
    MooncakeStoreConnector,
    output,
    step,
    vllm_config,
)

LABELS = {"model_name": "tiny", "engine": "0"}
ENGINES: dict[int, list[object]] = {0: ["tiny", "0"]}


@dataclass
class FakeStats:
    """As strict as LMCache's: another class cannot be added."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data.setdefault("seen", [])

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def reset(self) -> None:
        self.data = {"seen": []}

    def aggregate(self, other: Any) -> "FakeStats":
        if not isinstance(other, FakeStats):
            raise TypeError(type(other))
        self.data["seen"].extend(other.data["seen"])
        return self

    def reduce(self) -> dict[str, Any]:
        return {"count": len(self.data["seen"])}

    def is_empty(self) -> bool:
        return not self.data["seen"]


@dataclass
class MultiKVConnectorStats(FakeStats):
    """As vLLM's: the children's stats by name of their class."""

    def __post_init__(self) -> None: ...

    def to_dict(self) -> dict[str, Any]:
        return {name: stats.to_dict() for name, stats in self.data.items()}

    def aggregate(self, other: Any) -> "MultiKVConnectorStats":
        for name, stats in other.data.items():
            if name in self.data:
                assert isinstance(stats, type(self.data[name]))
                self.data[name] = self.data[name].aggregate(stats)
            else:
                self.data[name] = stats
        return self

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.data.values())


class FakeProm:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.seen += transfer_stats_data["seen"]


class StatsMixin:
    """What connectors of vLLM have beyond the fake's."""

    stats: Any = None
    prom: Any = None

    def get_kv_connector_stats(self) -> Any:
        super().get_kv_connector_stats()  # type: ignore[misc]
        given, self.stats = self.stats, None
        return given

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return FakeStats(data) if data is not None else FakeStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return cls.prom


class Measured(StatsMixin, FakeConnector): ...


class Other(StatsMixin, MooncakeStoreConnector): ...


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    monkeypatch.setenv("KVGUARD_VLLM_METRICS", "on")
    totals = runtime.recorder, runtime.failsafe
    runtime.table.tally = Tally(
        lambda: totals[0].dropped, lambda: totals[1].errors, lambda: 2.5, lambda: runtime.clock.now / 1e9
    )
    return runtime


def make(inner: type = Measured, role: Any = SCHEDULER) -> Any:
    return guarded(inner)(vllm_config(), role, None)


def engine_step(connector: Any, workers: Any = None) -> Any:
    """What vLLM's scheduler does with stats at the end of a step; the payload as it arrives in the API process."""
    reported = output()
    reported.kv_connector_stats = workers
    connector.update_connector_output(reported)
    stats = reported.kv_connector_stats
    ours = connector.get_kv_connector_stats()
    if ours is not None and not ours.is_empty():
        stats = stats.aggregate(ours) if stats is not None else ours
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict() if stats is not None else None))


class Api:
    """vLLM's API process with a registry of its own."""

    def __init__(self, cls: Any) -> None:
        self.registry = CollectorRegistry()
        self.engines = dict(ENGINES)
        types = {Counter: partial(Counter, registry=self.registry), Gauge: partial(Gauge, registry=self.registry)}
        self.prom = cls.build_prom_metrics(vllm_config(), types, list(LABELS), self.engines)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:kvguard_{name}", {**LABELS, **labels})


def test_off_by_default_and_then_nothing_is_touched(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "off"):
        if value:
            monkeypatch.setenv("KVGUARD_VLLM_METRICS", value)
        cls = guarded(Measured)
        assert [each.__name__ for each in cls.__mro__[:3]] == ["Measured", "Measured", "StatsMixin"]
        for name in ("build_kv_connector_stats", "build_prom_metrics"):
            assert getattr(cls, name).__func__ is getattr(Measured, name).__func__
        connector = cls(vllm_config(), SCHEDULER, None)
        theirs = connector.stats = FakeStats({"seen": [1]})
        assert connector.get_kv_connector_stats() is theirs
        assert connector.get_kv_connector_stats() is None
        reported = output()
        workers = reported.kv_connector_stats = FakeStats({"seen": [2]})
        connector.update_connector_output(reported)
        assert reported.kv_connector_stats is workers
    assert runtime.table.tally is None


def test_counts_arrive_with_their_values_next_to_the_connectors_own(on: FakeRuntime) -> None:
    connector = make()
    api = Api(type(connector))
    api.prom._inner = theirs = FakeProm()
    assert api.value("reads_begun_total") == 0.0  # there before anything has happened
    requests = {name: FakeRequest(name) for name in ("hit", "miss", "refused")}
    payloads = []
    for name, request in requests.items():
        connector.match = (0, False) if name == "miss" else (2048, True)
        on.directive = OFF if name == "refused" else None
        request.arrival_time = on.clock.wall_seconds()
        connector.on_new_request(request)
        tokens, _ = connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, FakeBlocks(1), tokens)
        if tokens:
            connector.update_connector_output(output(finished={name}))
        connector.build_connector_meta(step(request))
        request.num_output_tokens = 1
        connector.stats = FakeStats({"seen": [name]})
        payloads.append(engine_step(connector, FakeStats({"seen": [f"worker {name}"]})))
    assert payloads[1] == {
        "kvguard": {"decisions": {"none miss": 1}, "counts": {}, "age": 2.5},
        "inner": {"seen": ["worker miss", "miss"]},
    }
    for payload in payloads:
        api.prom.observe(payload, 0)
    assert api.value("decisions_total", decision="remote", reason="no-directive") == 1.0
    assert api.value("decisions_total", decision="none", reason="miss") == 1.0
    assert api.value("decisions_total", decision="decline", reason="off") == 1.0
    assert api.value("reads_begun_total") == 1.0
    assert api.value("reads_failed_total") == 0.0
    assert api.value("directive_age_seconds") == 2.5
    assert theirs.seen == ["worker hit", "hit", "worker miss", "miss", "worker refused", "refused"]
    # in vLLM's log as before, without ours
    (logged,) = {type(connector).build_kv_connector_stats(payload).reduce()["count"] for payload in payloads}
    assert logged == 2
    assert on.failsafe.errors == 0


def test_failed_reads_drops_and_errors_are_counted_once(on: FakeRuntime) -> None:
    connector = make()
    api = Api(type(connector))
    request = FakeRequest("a", arrival_time=on.clock.wall_seconds())
    connector.on_new_request(request)
    tokens, _ = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), tokens)
    connector.update_connector_output(output(finished={"a"}, failed={"a"}))
    on.recorder.dropped = 7
    on.failsafe.record("test", ValueError())
    for _ in range(3):
        payload = engine_step(connector)
        if payload is not None:
            api.prom.observe(payload)
    assert {name: api.value(f"{name}_total") for name in ("reads_begun", "reads_failed")} == {
        "reads_begun": 1.0,
        "reads_failed": 1.0,
    }
    assert api.value("records_dropped_total") == 7.0
    assert api.value("hook_errors_total") == 1.0


def test_nothing_is_sent_while_nothing_changes_but_the_age_once_a_second(on: FakeRuntime) -> None:
    connector = make()
    told = []
    for _ in range(25):
        on.clock.tick(100)
        told.append(engine_step(connector))
    assert [payload["kvguard"]["age"] for payload in told if payload is not None] == [2.5] * 3
    on.table.tally = Tally(lambda: 0, lambda: 0, lambda: None)  # no directives yet: nothing to say
    assert engine_step(connector) is None


def test_workers_are_left_alone(on: FakeRuntime) -> None:
    connector = make(role=WORKER)
    connector.stats = theirs = FakeStats({"seen": [1]})
    assert connector.get_kv_connector_stats() is theirs


def test_an_error_of_ours_leaves_the_connectors_stats(on: FakeRuntime) -> None:
    def broken() -> int:
        raise RuntimeError("broken")

    connector = make()
    on.table.tally = Tally(broken, broken, lambda: None)
    for _ in range(on.failsafe._limit + 1):
        connector.stats = FakeStats({"seen": ["ours"]})
        payload = engine_step(connector, FakeStats({"seen": ["workers"]}))
        assert payload == {"kvguard": None, "inner": {"seen": ["workers", "ours"]}}
    assert on.failsafe.errors == 1  # our counters have ended, and nothing else has
    assert not on.failsafe.tripped


def test_stats_are_wrapped_after_the_failsafe_has_tripped(on: FakeRuntime) -> None:
    connector = make()
    on.failsafe.tripped = True
    connector.stats = FakeStats({"seen": ["ours"]})
    payload = engine_step(connector, FakeStats({"seen": ["workers"]}))
    assert payload == {"kvguard": None, "inner": {"seen": ["workers", "ours"]}}
    assert engine_step(connector) is None


def test_worker_stats_that_cannot_be_replaced_end_it_for_good(on: FakeRuntime) -> None:
    class Frozen:
        finished_recving = kv_connector_worker_meta = None
        kv_connector_stats = property(lambda _: FakeStats({"seen": [1]}))

    connector = make()
    connector.update_connector_output(Frozen())
    connector.stats = theirs = FakeStats({"seen": [2]})
    assert connector.get_kv_connector_stats() is theirs
    assert on.failsafe.errors == 1
    connector.stats = FakeStats({"seen": [2]})
    assert engine_step(connector, FakeStats({"seen": [1]})) == {"seen": [1, 2]}
    api = Api(type(connector))  # the other process does not know
    api.prom._inner = inner = FakeProm()
    api.prom.observe({"seen": [1, 2]})
    assert inner.seen == [1, 2]


def test_two_children_of_a_multi_connector_tell_each_count_once(on: FakeRuntime) -> None:
    children = [make(Measured), make(Other), make(Measured)]
    serve(children[1], FakeRequest("a"), on)
    on.table.tally.decided(Decision("remote", "on"))  # type: ignore[union-attr]
    for each in children:
        each.stats = FakeStats({"seen": [0]})
    reported = output()
    reported.kv_connector_stats = stats = MultiKVConnectorStats(
        {name: FakeStats({"seen": [1]}) for name in ("Measured", "Other", "Plain")}
    )
    for each in children:
        each.update_connector_output(reported)
    ours = MultiKVConnectorStats()
    for each in children:
        name = type(each).__name__
        mine = each.get_kv_connector_stats()
        ours.data[name] = ours.data[name].aggregate(mine) if name in ours.data else mine
    plain = stats.aggregate(ours).to_dict()
    assert plain["Measured"]["inner"] == {"seen": [1, 0, 0]}
    assert plain["Other"]["inner"] == {"seen": [1, 0]}
    assert plain["Plain"] == {"seen": [1]}
    told = [plain[name]["kvguard"] for name in ("Measured", "Other") if plain[name]["kvguard"] is not None]
    assert sum(each["decisions"].get("remote on", 0) for each in told) == 1
    # one set of metrics for both, since vLLM's registry takes a name once
    registry = CollectorRegistry()
    types = {Counter: partial(Counter, registry=registry), Gauge: partial(Gauge, registry=registry)}
    engines = dict(ENGINES)
    proms = [guarded(cls).build_prom_metrics(vllm_config(), types, list(LABELS), engines) for cls in (Measured, Other)]
    for prom, name in zip(proms, ("Measured", "Other"), strict=True):
        prom.observe(plain[name])
    labels = {**LABELS, "decision": "remote", "reason": "on"}
    assert registry.get_sample_value("vllm:kvguard_decisions_total", labels) == 1.0


def test_metrics_that_cannot_be_made_or_fed_leave_the_connectors(
    on: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    inner = FakeProm()
    assert families_for({}, [], {}) is None
    PromMetrics(inner, None).observe({"kvguard": {"decisions": {}}, "inner": {"seen": [1]}})
    api = Api(guarded(Measured))
    api.prom._inner = inner
    for seen in (2, 3):
        api.prom.observe({"kvguard": {"another": "shape"}, "inner": {"seen": [seen]}})
    assert inner.seen == [1, 2, 3]
    assert len([line for line in caplog.messages if "vLLM's metrics" in line]) == 2
    PromMetrics(None, None).observe({"seen": [1]})


def test_the_log_adds_steps_with_and_without_the_connectors_part() -> None:
    total = Told(None, None)
    assert total.is_empty()
    for stats in (None, FakeStats({"seen": [1]}), None, FakeStats({"seen": [2, 3]})):
        total = total.aggregate(Told({"decisions": {"a b": 1}, "counts": {"x": 1}, "age": None}, stats))
    assert total.reduce() == {"count": 3}
    assert total.data["kvguard"] == {"decisions": {"a b": 4}, "counts": {"x": 4}, "age": None}
    total.reset()
    assert total.is_empty()


def test_a_connector_without_stats_stays_as_it_is(on: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    connector = make(FakeConnector)
    assert connector.get_kv_connector_stats() is None
    assert "no build_kv_connector_stats, build_prom_metrics" in caplog.text


def test_the_process_makes_a_tally_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guard.hook.runtime.Exporter.start", lambda self: None)
    from guard.hook.config import HookConfig

    config = HookConfig(endpoints=("http://unused",))
    assert Runtime(config, vllm_config()).table.tally is None
    made = Runtime(replace(config, vllm_metrics=True), vllm_config())
    assert made.table.tally is made.tally is not None
    assert made.tally.take() is None  # no directives, no counts
    made.recorder.dropped = 3
    assert made.tally.take() == {"decisions": {}, "counts": {"records_dropped": 3}, "age": None}


def test_every_family_is_registered_with_vllms_labels() -> None:
    registry = CollectorRegistry()
    types = {Counter: partial(Counter, registry=registry), Gauge: partial(Gauge, registry=registry)}
    Families(types, list(LABELS), ENGINES)
    assert {each.name for each in registry.collect()} == {f"vllm:kvguard_{family.name}" for family in FAMILIES}
