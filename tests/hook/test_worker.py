"""The worker's records."""

import pytest

from guard import semconv
from guard.connectors import LMCACHE_MP
from guard.hook.envelope import Context, Envelope, Load
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
