"""The hook's invariants (docs/architecture.md) that no other file tests by name, without vLLM.

`test_connector.py` has most of 1 to 5, 9 and 10; what needs a real engine (7 above all) is in tests/lab.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import guard
from guard import gate, semconv
from guard.hook import connector as module
from guard.hook import plugin, recorder, requests, scheduler, spans, table
from guard.hook.config import HookConfig
from guard.hook.connector import guarded
from guard.hook.directives import Directives
from guard.hook.exporter import SLICE_SECONDS, SLICE_SPANS, Exporter
from guard.hook.failsafe import Failsafe
from guard.hook.recorder import Recorder
from guard.hook.requests import Scope
from guard.hook.table import RequestTable
from guard.hook.transport import Reply
from guard.hook.worker import ENVELOPE, Contexts, Envelope, SyncLoads
from guard.pace import PERMIT_NS
from guard.wire import Directive, DirectiveSet, Reads, Span
from tests.hook.fakes_vllm import (
    SCHEDULER,
    WORKER,
    Clock,
    FakeBlocks,
    FakeConnector,
    FakeRequest,
    FakeStatus,
    MooncakeStoreConnector,
    NixlConnector,
    output,
    step,
    vllm_config,
)

ENGINE = "h:1/0"
OFF = Directive(id="d1", engine_id=ENGINE, backend="x", mode=semconv.MODE_OFF)


class Process:
    """One process of vLLM without threads or network: what the guarded connectors of it share."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine_id = ENGINE
        self.failsafe = Failsafe(limit=1000)
        self.recorder = Recorder()
        self.scope = Scope(ENGINE, "tiny")
        self.table = RequestTable(self.recorder, self.scope, clock=self.clock, wall=self.clock.wall)
        self.contexts = Contexts()
        self.boot = "boot"
        self.rank = 0
        self.directive: Directive | None = None
        self.joined = 0

    def current(self, backend: str) -> Directive | None:
        return self.directive

    def join(self, backend: Any, *, scheduler: bool) -> int:
        self.joined += 1
        return self.joined

    def leave(self) -> None:
        self.joined -= 1

    def spans(self) -> list[Span]:
        return [span for record in self.recorder.drain(1000) for span in record.spans()]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(module, "runtime_for", lambda config: made)
    return made


def new(inner: type = FakeConnector, role: Any = SCHEDULER, **transfer: Any) -> Any:
    return guarded(inner)(vllm_config(**transfer), role, None)


def arrive(process: Process, *connectors: Any, **fields: Any) -> FakeRequest:
    request = FakeRequest(**{"arrival_time": process.clock.wall_seconds(), **fields})
    for connector in connectors:
        connector.on_new_request(request)
    return request


class Service:
    """A transport whose answers are given; an exception among them is raised."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.paths: list[str] = []
        self.tags: list[str | None] = []

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        self.paths.append(path)
        self.tags.append(headers.get("If-None-Match"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def failover(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def answer(*items: Directive, **changed: Any) -> Reply:
    data = DirectiveSet(engine_id=ENGINE, etag='"e"', directives=items).to_json()
    return Reply(200, json.dumps({**data, **changed}).encode())


def poller(service: Service, clock: Any) -> Directives:
    config = HookConfig(endpoints=("http://unused",))
    return Directives(config, ENGINE, ["x"], "tiny", transport=service, clock=clock)


def test_invariant_1_a_lease_that_runs_out_opens_unless_the_operator_said_keep(clock: Any) -> None:
    opens = poller(Service(answer(replace(OFF, on_lease_expiry="open"))), clock)
    keeps = poller(Service(answer(replace(OFF, on_lease_expiry="keep", ttl_seconds=60.0))), clock)
    for directives in (opens, keeps):
        directives.poll()
        assert directives.current("x") is not None
    clock.advance(15.1)  # the service is gone
    assert opens.current("x") is None
    assert keeps.current("x") is not None
    clock.advance(45.0)
    assert keeps.current("x") is None  # keep lasts until its own end


@pytest.mark.parametrize(
    "reply",
    [
        OSError("refused"),
        Reply(500, b""),
        Reply(200, b"garbage"),
        Reply(200, b"[]"),
        answer(OFF, schema=semconv.SCHEMA + 1),
        answer(replace(OFF, mode="someday")),
        Reply(304, b""),
    ],
)
def test_invariant_1_an_unreadable_answer_leaves_vllm_as_without_kvguard(clock: Any, reply: Reply | Exception) -> None:
    directives = poller(Service(reply), clock)
    assert directives.poll() >= 0.0
    assert directives.current("x") is None


def test_invariant_1_the_hook_says_which_schema_it_reads(clock: Any) -> None:
    service = Service(answer())
    poller(service, clock).poll()
    assert f"schema={semconv.SCHEMA}" in service.paths[0]


def test_invariant_2_an_admitted_load_reaches_vllm_as_the_connector_made_it(process: Process) -> None:
    """The worker's results, the metadata and the answers are the inner connector's own objects."""
    scheduler, worker = new(), new(role=WORKER)
    request = arrive(process, scheduler)
    scheduler.match = (2048, True)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (2048, True)
    scheduler.update_state_after_alloc(request, FakeBlocks(1), 2048)
    worker._connector_metadata = scheduler.build_connector_meta(step())
    worker.start_load_kv(SimpleNamespace())
    assert worker.get_finished({"a"}) == (None, {"a"})
    report = output(finished={request.request_id}, blocks={7})
    before = dict(vars(report))
    scheduler.update_connector_output(report)
    assert vars(report) == before
    assert scheduler.request_finished(request, []) == (True, None)


def test_invariant_3_a_declined_request_stays_declined_through_preemption_and_failure_of_others(
    process: Process,
) -> None:
    connector = new()
    process.directive = OFF
    request = arrive(process, connector)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    process.directive = None  # not even the end of the lease brings it back
    for status in ("WAITING", "PREEMPTED"):
        request.status = FakeStatus(status)
        assert connector.get_num_new_matched_tokens(request, 16) == (0, False)


WORKER_CALLS: dict[str, Callable[[Any], Any]] = {
    "start_load_kv": lambda c: c.start_load_kv(SimpleNamespace()),
    "wait_for_save": lambda c: c.wait_for_save(),
    "get_finished": lambda c: c.get_finished({"a"}),
    "build_connector_worker_meta": lambda c: c.build_connector_worker_meta(),
}


@pytest.mark.parametrize("name", WORKER_CALLS)
def test_invariant_5_nothing_of_ours_raises_in_a_worker(process: Process, name: str) -> None:
    class Broken:
        def __getattr__(self, attribute: str) -> Any:
            raise RuntimeError(attribute)

    worker = new(role=WORKER)
    worker._kvguard_worker = worker._kvguard_adapter = Broken()
    for plain in (((("r1", 1, True, 2, 3),), (("r1", 7, 1, 512, True),), 5), "of another version", 3):
        worker.calls.clear()
        worker._connector_metadata = SimpleNamespace(**{ENVELOPE: plain})
        WORKER_CALLS[name](worker)
        assert worker.calls == [name]


def test_invariant_5_past_the_limit_a_worker_records_nothing_and_still_answers_as_its_step_asks(
    process: Process,
) -> None:
    worker = new(role=WORKER)
    worker._connector_metadata = SimpleNamespace(**{ENVELOPE: ((("r", 1, True, 2, 3),), (("r", 7, 1, 512, False),), 5)})
    process.failsafe.tripped = True
    worker.start_load_kv(SimpleNamespace())
    wrapped = worker.build_connector_worker_meta()
    assert isinstance(wrapped, SyncLoads)  # every rank must answer alike
    assert len(process.recorder) == 0


def test_invariant_5_an_output_without_worker_metadata_passes(process: Process) -> None:
    class Older(FakeConnector):
        def update_connector_output(self, connector_output: Any) -> None:
            self.calls.append("update_connector_output")

    connector = new(Older)
    connector.update_connector_output(SimpleNamespace(finished_recving=None, finished_sending=None))
    assert connector.calls == ["update_connector_output"]
    assert process.failsafe.errors == 0


def test_invariant_5_an_adapter_that_fails_costs_neither_stores_nor_times(process: Process) -> None:
    connector = new()
    process.directive = replace(OFF, stores=False)
    adapter = connector._kvguard_scheduler.adapter
    for name in ("stop_stores", "resume_stores", "meta_built"):
        setattr(adapter, name, lambda *_, **__: 1 / 0)
    request = arrive(process, connector)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), 0)
    connector.build_connector_meta(step(request))
    request.num_output_tokens = 1
    connector.get_kv_connector_stats()
    assert semconv.TTFT in process.spans()[0].attributes
    assert process.failsafe.errors == 3


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), GeneratorExit()])
def test_invariant_5_register_never_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(env: Any) -> bool:
        raise error

    monkeypatch.setattr(plugin, "install", fail)
    plugin.register()


def test_invariant_5_a_hook_that_stepped_aside_acknowledges_nothing(clock: Any) -> None:
    """Else the operator would read that `off` is applied while every request reads."""
    service = Service(answer(OFF), Reply(304, b""), answer(OFF), answer(OFF))
    directives = poller(service, clock)
    for _ in range(2):
        directives.poll()
    assert [bool(tag) for tag in service.tags] == [False, True]
    for _ in range(20):
        directives._failsafe.record("test", ValueError("x"))
    assert directives._failsafe.tripped
    assert [directives.poll(), directives.poll()] == [5.0, 5.0]  # calmly
    assert not any(service.tags[2:])


FORBIDDEN = {
    "acquire", "open", "connect", "send", "sendall", "recv", "getaddrinfo", "write", "flush", "sleep", "stat", "lstat",
    "select", "poll", "wait", "dumps", "compress",
}  # fmt: skip


def test_invariant_6_no_io_and_no_lock_on_engine_threads(process: Process) -> None:
    """Every C function that our part of a request's life calls on the scheduler's thread is looked at."""
    connector = new()
    process.directive = replace(OFF, mode=semconv.MODE_AUTO, reads=Reads(max_inflight=8, max_inflight_bytes=1 << 30))
    called: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            called.add(argument.__name__)

    request = FakeRequest(arrival_time=process.clock.wall_seconds())
    sys.setprofile(watch)
    try:
        connector.on_new_request(request)
        connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
        connector.build_connector_meta(step())
        connector.update_connector_output(output(finished={request.request_id}))
        connector.build_connector_meta(step(request))
        request.num_output_tokens = 1
        connector.get_kv_connector_stats()
        connector.request_finished(request, [])
    finally:
        sys.setprofile(None)
    assert "append" in called  # the ring was reached
    assert not called & FORBIDDEN
    assert len(process.recorder) == 2
    assert process.failsafe.errors == 0
    for part in (gate, recorder, requests, scheduler, spans, table):  # `with lock` would not show above
        assert not {"threading", "socket", "os", "io", "logging", "Path"} & set(vars(part))


def test_invariant_6_the_ring_drops_its_oldest_and_counts() -> None:
    ring = Recorder(4)
    records: list[Any] = [SimpleNamespace(number=number) for number in range(10)]
    for record in records:
        ring.append(record)
    assert ring.drain(100) == records[6:]
    assert ring.dropped == 6


def test_invariant_6_the_drain_thread_lets_go_of_the_gil_within_a_millisecond() -> None:
    class Ticking:
        """A machine on which a span takes 0.1 ms."""

        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock, held, began = Ticking(), [], [0.0]

    def pause(seconds: float) -> None:
        held.append(clock.now - began[0])
        began[0] = clock.now

    class Slow:
        def spans(self) -> list[Span]:
            clock.now += 1e-4
            return [Span("kvguard.kv.read", "1" * 32, "2" * 16, "", 1, 2, {})]

    ring = Recorder()
    for _ in range(200):
        ring.append(Slow())
    config = HookConfig(endpoints=("http://unused",))
    exporter = Exporter(config, ring, {}, transport=Service(Reply(200, b"{}")), clock=clock, pause=pause)
    exporter.step()
    assert len(held) >= 200 // SLICE_SPANS
    assert max(held) <= SLICE_SECONDS + 1e-4 + 1e-9 <= 1e-3


@pytest.mark.parametrize("match", [(2048, True), (2048, False), (0, False), (None, True)])
def test_invariant_7_the_inner_connector_sees_the_same_calls_as_unhooked(
    process: Process, match: tuple[int | None, bool]
) -> None:
    """The remote road: same calls, same answers. Same output on a real engine is a lab test."""
    answers = []
    for connector in (FakeConnector(vllm_config(), SCHEDULER, None), new()):
        connector.match = match
        request = FakeRequest()
        said: list[Any] = [connector.on_new_request(request), connector.get_num_new_matched_tokens(request, 0)]
        tokens = match[0] or 0
        said.append(connector.update_state_after_alloc(request, FakeBlocks(1), tokens))
        said.append(type(connector.build_connector_meta(step(request))))
        connector.update_connector_output(output(finished={request.request_id} if match[1] else None))
        said += [connector.get_kv_connector_stats(), connector.request_finished(request, []), list(connector.calls)]
        answers.append(said)
    assert answers[0] == answers[1]
    assert process.failsafe.errors == 0


def test_invariant_8_import_light(tmp_path: Path) -> None:
    """Every module of the hook imports with nothing but the standard library, and starts no thread."""
    root = Path(guard.__file__).parent
    names = [
        "guard.hook." + ".".join(path.relative_to(root / "hook").with_suffix("").parts)
        for path in sorted((root / "hook").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = (
        f"import sys, importlib, threading; sys.path.insert(0, {str(root.parent)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert threading.active_count() == 1\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'guard', '__main__', '__mp_main__'}))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
    assert len(names) > 15


def test_invariant_9_a_hand_off_sibling_does_not_keep_hits_from_being_refused(process: Process) -> None:
    """MultiConnector[Nixl, store]: what the store matches for a plain request is a hit like any other."""
    nixl, store = new(NixlConnector), new()
    process.directive = OFF
    nixl.match = (0, False)
    plain = arrive(process, nixl, store)
    assert nixl.get_num_new_matched_tokens(plain, 0) == (0, False)
    assert store.get_num_new_matched_tokens(plain, 0) == (0, False)
    for connector in (nixl, store):
        connector.update_state_after_alloc(plain, FakeBlocks(1), 0)
        connector.build_connector_meta(step(plain))
    plain.num_output_tokens = 1
    store.get_kv_connector_stats()
    root = next(span for span in process.spans() if span.name == semconv.SPAN_REQUEST)
    assert root.attributes[semconv.DECISION] == "decline"
    assert semconv.HANDOFF not in root.attributes
    handed = arrive(process, nixl, store, request_id="handed", kv_transfer_params={"do_remote_prefill": True})
    nixl.match = (2048, True)
    assert nixl.get_num_new_matched_tokens(handed, 0) == (2048, True)
    assert store.get_num_new_matched_tokens(handed, 0) == (2048, True)


def test_invariant_10_request_ids_can_be_turned_off(process: Process) -> None:
    process.scope = Scope(ENGINE, "tiny", request_ids=False, salt=b"salt")
    process.table = RequestTable(process.recorder, process.scope, clock=process.clock, wall=process.clock.wall)
    scheduler, worker = new(), new(role=WORKER)
    request = arrive(process, scheduler, request_id="cmpl-secret-0123abcd")
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, FakeBlocks(1), 2048)
    worker._connector_metadata = scheduler.build_connector_meta(step())
    worker.start_load_kv(SimpleNamespace())
    worker._kvguard_worker.finished({request.request_id}, ())
    scheduler.update_connector_output(output(finished={request.request_id}))
    scheduler.build_connector_meta(step(request))
    request.num_output_tokens = 2
    scheduler.get_kv_connector_stats()
    scheduler.request_finished(request, [])
    spans = process.spans()
    assert {span.name for span in spans} == {
        semconv.SPAN_REQUEST, semconv.SPAN_LOOKUP, semconv.SPAN_FETCH, semconv.SPAN_LOAD, semconv.SPAN_DECODE,
    }  # fmt: skip
    assert "secret" not in str(spans)
    assert len({span.attributes[semconv.INTERNAL_ID] for span in spans}) == 1


def test_invariant_aborted_requests_have_no_ttft_and_live_until_their_load_has_ended(process: Process) -> None:
    connector = new()
    request = arrive(process, connector)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, FakeBlocks(1), 2048)
    connector.request_finished(request, [])
    spans = {span.name: span for span in process.spans()}
    assert spans[semconv.SPAN_REQUEST].attributes[semconv.ABORTED] is True
    assert semconv.TTFT not in spans[semconv.SPAN_REQUEST].attributes
    assert semconv.SPAN_FETCH not in spans
    process.clock.tick(500)
    connector.update_connector_output(output(finished={request.request_id}))
    (fetch,) = process.spans()
    assert fetch.seconds == pytest.approx(0.5)
    assert fetch.parent_id == spans[semconv.SPAN_REQUEST].span_id


def test_invariant_permits_age_out(process: Process) -> None:
    connector = new()
    process.directive = replace(OFF, mode=semconv.MODE_AUTO, reads=Reads(max_inflight=1))
    lost = arrive(process, connector)
    connector.get_num_new_matched_tokens(lost, 0)
    connector.update_state_after_alloc(lost, FakeBlocks(1), 2048)
    refused = arrive(process, connector, request_id="refused")
    assert connector.get_num_new_matched_tokens(refused, 0) == (0, False)
    process.clock.now += PERMIT_NS + 1
    later = arrive(process, connector, request_id="later")
    assert connector.get_num_new_matched_tokens(later, 0) == (2048, True)


def test_invariant_the_slowest_rank_counts() -> None:
    ranks = [SyncLoads(None, 5, 100, end, "boot") for end in (130, 190, 150)]
    merged = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert (merged.batch, merged.end - merged.start) == (5, 90)


def test_invariant_wall_clock_steps_make_no_negative_times(process: Process) -> None:
    connector = new()
    request = arrive(process, connector)
    process.clock.offset -= 3600 * 10**9  # an hour back
    connector = new()
    other = FakeRequest("b", arrival_time=process.clock.wall_seconds() + 3600)
    for one in (request, other):
        connector.on_new_request(one)
        connector.get_num_new_matched_tokens(one, 0)
        connector.update_state_after_alloc(one, FakeBlocks(1), 0)
        process.clock.tick(5)
        process.clock.offset -= 60 * 10**9
        connector.build_connector_meta(step(one))
        one.num_output_tokens = 1
        connector.get_kv_connector_stats()
    roots = [span for span in process.spans() if span.name == semconv.SPAN_REQUEST]
    assert len(roots) == 2
    for root in roots:
        assert root.seconds >= 0.0
        assert min(root.attributes[name] for name in (*semconv.TIME_PARTS, semconv.TTFT)) >= 0.0


def test_invariant_directives_are_read_on_the_scheduler_side_only(process: Process) -> None:
    """A worker's connector neither joins as a scheduler nor asks for what is in force."""
    asked: list[str] = []
    process.current = asked.append  # type: ignore[method-assign, assignment]
    worker = new(MooncakeStoreConnector, WORKER)
    for call in WORKER_CALLS.values():
        call(worker)
    assert worker._kvguard_scheduler is None
    assert asked == []
    assert Envelope.read(None) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "kvguard-directives"]
