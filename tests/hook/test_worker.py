"""The worker's records, and timing that survives vLLM's aggregation over ranks."""

import pickle
from dataclasses import dataclass

import pytest

from guard import semconv
from guard.connectors import LMCACHE_MP
from guard.hook.envelope import Context, Envelope, Load, SyncLoads, boot_id
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.worker import Contexts, WorkerSide
from guard.wire import Span

BACKEND = Backend(label="b", capability=LMCACHE_MP, block_tokens=16, rank_bytes=10, ranks=2)
CONTEXT = Context("r1", 0xAA, True, 0x1, 0x2)


def spans(recorder: Recorder) -> list[Span]:
    return [span for record in recorder.drain(100) for span in record.spans()]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def side(recorder: Recorder) -> WorkerSide:
    return WorkerSide(recorder, Scope("h:1/0", "m"), BACKEND, rank=3)


def test_an_envelope_survives_the_way_to_another_process() -> None:
    envelope = Envelope((CONTEXT,), (Load("r1", 7, 1, 512, False),), 9)
    sent = pickle.dumps(envelope.plain())
    assert b"guard" not in sent  # a worker on a machine without kvguard reads the step too
    assert Envelope.read(pickle.loads(sent)) == envelope  # noqa: S301
    assert Envelope.read(None) is None
    assert Envelope.read((((("r1", 1),)), (), 0)) is None  # of another version
    wrapped = SyncLoads(None, 9, 1, 2, "boot")
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped  # noqa: S301


def test_a_load_is_told_once_by_its_rank_under_its_fetch(side: WorkerSide, recorder: Recorder) -> None:
    side.begin(Envelope((CONTEXT,), (Load("r1", 7, 2, 512, True),), 0), 1)
    side.finished({"r1", "unknown"}, {"r1"})
    side.finished({"r1"}, ())
    (span,) = spans(recorder)
    assert (span.name, span.trace_id, span.parent_id) == (semconv.SPAN_LOAD, f"{0xAA:032x}", f"{7:016x}")
    assert span.attributes[semconv.RANK] == 3
    assert span.attributes[semconv.ATTEMPT] == 2
    assert span.attributes[semconv.BYTES] == 5120  # this rank's share
    assert span.attributes[semconv.OUTCOME] == "failed"


def test_a_store_lasts_from_its_submission_until_it_is_no_longer_pending(side: WorkerSide, recorder: Recorder) -> None:
    side.begin(Envelope((CONTEXT,), (), 0), 1)
    side.stores({"r1": 256, "nobody": 16}, began=5)
    assert spans(recorder) == []
    side.stores({"r1": 0}, began=99)  # still the same store
    side.stores({})
    (span,) = spans(recorder)
    assert (span.name, span.parent_id) == (semconv.SPAN_STORE, f"{1:016x}")
    assert span.attributes[semconv.TOKENS] == 256
    assert span.seconds > 0


def test_an_unsampled_trace_is_marked(side: WorkerSide, recorder: Recorder) -> None:
    side.begin(Envelope((CONTEXT._replace(sampled=False),), (Load("r1", 7, 1, 1, True),), 0), 1)
    side.finished({"r1"}, ())
    assert spans(recorder)[0].attributes[semconv.SAMPLED] is False


def test_contexts_are_bounded() -> None:
    contexts = Contexts(limit=2)
    for number in range(5):
        name = f"r{number}"
        contexts.add(Envelope((CONTEXT._replace(request_id=name),), (Load(name, number, 1, 1, True),), 0))
    assert contexts.get("r2") is None
    assert contexts.fetch_span("r2") == 0
    assert contexts.fetch_span("r4") == 4


@dataclass
class Theirs:
    """A connector's own worker metadata, as strict as LMCache's."""

    value: int

    def aggregate(self, other: object) -> "Theirs":
        assert isinstance(other, Theirs)
        return Theirs(self.value + other.value)


def test_the_slowest_rank_counts_and_the_connectors_own_part_is_merged() -> None:
    fast = SyncLoads(Theirs(1), 9, 100, 150, "boot")
    slow = SyncLoads(Theirs(2), 9, 100, 190, "boot")
    for merged in (fast.aggregate(slow), slow.aggregate(fast)):
        assert (merged.start, merged.end, merged.inner) == (100, 190, Theirs(3))


def test_ranks_on_other_machines_are_compared_by_duration() -> None:
    here = SyncLoads(None, 9, 1000, 1050, "here")
    there = SyncLoads(None, 9, 5, 100, "there")
    assert here.aggregate(there).boot == "there"
    assert there.aggregate(here).boot == "there"


def test_a_rank_without_timing_does_not_break_the_aggregation() -> None:
    wrapped = SyncLoads(Theirs(1), 9, 0, 5, "boot")
    assert wrapped.aggregate(Theirs(2)).inner == Theirs(3)
    assert SyncLoads(None, 9, 0, 5, "boot").aggregate(Theirs(2)).inner == Theirs(2)
    assert wrapped.aggregate(SyncLoads(None, 9, 0, 9, "boot")).inner == Theirs(1)
    assert SyncLoads(None, 9, 0, 5, "boot").aggregate(wrapped).inner == Theirs(1)


def test_the_clock_has_one_name_per_machine() -> None:
    assert boot_id() == boot_id() != ""
