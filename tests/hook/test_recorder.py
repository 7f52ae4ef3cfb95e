"""The ring: oldest out first, every drop counted, importable without anything installed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import guard
from guard.hook.recorder import Recorder
from guard.wire import Span


class Numbered:
    def __init__(self, number: int) -> None:
        self.number = number

    def spans(self) -> Iterator[Span]:
        yield from ()


def numbers(recorder: Recorder, limit: int = 100) -> list[int]:
    return [record.number for record in recorder.drain(limit)]


def test_drains_in_order_and_up_to_the_limit() -> None:
    recorder = Recorder(8)
    for number in range(5):
        recorder.append(Numbered(number))
    assert numbers(recorder, 2) == [0, 1]
    assert numbers(recorder) == [2, 3, 4]
    assert numbers(recorder) == []
    assert recorder.dropped == 0


def test_a_full_ring_drops_its_oldest_and_counts() -> None:
    recorder = Recorder(3)
    for number in range(10):
        recorder.append(Numbered(number))
    assert len(recorder) == 3
    assert recorder.dropped == 7
    assert numbers(recorder) == [7, 8, 9]


def test_needs_the_standard_library_only() -> None:
    root = Path(guard.__file__).parent.parent
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import guard.hook.recorder; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "'guard.hook.recorder'" in done.stdout
    for name in ("vllm", "torch", "numpy", "opentelemetry", "lmcache"):
        assert f"'{name}'" not in done.stdout
