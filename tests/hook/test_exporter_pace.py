"""The exporter lets go of the interpreter: slices by count and by time."""

from typing import Any

import pytest

from guard.hook import exporter as exporter_module
from guard.hook.config import HookConfig
from guard.hook.exporter import SLICE_SPANS, Exporter
from guard.hook.recorder import Recorder
from guard.wire import Span
from tests.hook.exporting import RESOURCE, FakeRecord, fill, make_span
from tests.hook.fake_transport import FakeTransport


class Pauses:
    """Counts encoded spans between two pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slices = [0]
        self.seconds: list[float] = []
        encode = exporter_module.encode_span

        def counted(span: Span) -> str:
            self.slices[-1] += 1
            return encode(span)

        monkeypatch.setattr(exporter_module, "encode_span", counted)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.slices.append(0)


@pytest.mark.parametrize("per_record", [1, 7, 100])
def test_a_slice_ends_after_so_many_spans(per_record: int, monkeypatch: pytest.MonkeyPatch, clock: Any):
    recorder = Recorder(1024)
    for number in range(210 // per_record):
        recorder.append(FakeRecord([make_span(number)] * per_record))
    pauses = Pauses(monkeypatch)
    exporter = Exporter(
        HookConfig(endpoints=("http://unused",)),
        recorder,
        RESOURCE,
        transport=FakeTransport(),
        clock=clock,  # stands still: the slice is fast
        pause=pauses,
    )
    exporter.step()
    assert sum(pauses.slices) == 210 // per_record * per_record
    assert max(pauses.slices) == SLICE_SPANS
    assert all(0 < seconds <= 0.001 for seconds in pauses.seconds)


def test_a_slice_ends_after_its_time_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch, new_clock: Any):
    recorder = Recorder(1024)
    fill(recorder, 50)
    pauses = Pauses(monkeypatch)
    exporter = Exporter(
        HookConfig(endpoints=("http://unused",)),
        recorder,
        RESOURCE,
        transport=FakeTransport(),
        clock=new_clock(per_call=0.0002),  # every span takes 0.2 ms
        pause=pauses,
    )
    exporter.step()
    assert sum(pauses.slices) == 50
    assert max(pauses.slices) * 0.0002 <= 0.001


def test_a_slow_record_yields_inside(monkeypatch: pytest.MonkeyPatch, clock: Any):
    recorder = Recorder(16)
    recorder.append(FakeRecord([make_span(number) for number in range(1000)]))
    pauses = Pauses(monkeypatch)
    Exporter(
        HookConfig(endpoints=("http://unused",)),
        recorder,
        RESOURCE,
        transport=FakeTransport(),
        clock=clock,
        pause=pauses,
    ).step()
    assert max(pauses.slices) == SLICE_SPANS
