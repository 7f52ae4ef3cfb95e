"""The exporter's thread: its start and end, a fork, and what it imports."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import guard
from guard.hook.recorder import Recorder
from guard.hook.transport import Reply
from tests.hook.exporting import FakeRecord, decode, fill, make, make_span
from tests.hook.fake_transport import FakeTransport


def test_thread_has_a_name_starts_once_delivers_soon_and_stops(service: Any, recorder: Recorder):
    exporter = make(service.url, recorder)
    exporter.start()
    exporter.start()
    assert [thread.name for thread in threading.enumerate()].count("kvguard-export") == 1
    assert next(thread for thread in threading.enumerate() if thread.name == "kvguard-export").daemon
    recorder.append(FakeRecord([make_span(1)]))
    service.wait_for(1)
    recorder.append(FakeRecord([make_span(2)]))
    exporter.stop(5.0)
    assert "kvguard-export" not in [thread.name for thread in threading.enumerate()]
    assert [span for seen in service.seen for span in decode(seen.body)[1]] == [make_span(1), make_span(2)]


def test_stop_does_not_wait_for_a_service_that_hangs(recorder: Recorder):
    asked = threading.Event()

    class Hanging(FakeTransport):
        released = threading.Event()

        def send(self, *args: Any, **kwargs: Any) -> Reply:
            asked.set()
            self.released.wait(20)
            raise TimeoutError

        def abort(self) -> None:
            self.released.set()

    exporter = make("http://unused", recorder, transport=Hanging())
    fill(recorder, 1)
    exporter.start()
    assert asked.wait(5)
    exporter.stop(0.05)
    thread = exporter._worker._thread
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()


FORK = """
import os, sys, threading, zlib
from guard.hook.config import HookConfig
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
from guard.hook.transport import Reply
from guard.wire import Span

class Record:
    def __init__(self, name):
        self.name = name
    def spans(self):
        return [Span(self.name, "1" * 32, "2" * 16, "", 1, 2, {})]

class Transport:
    bodies = b""
    sent = threading.Event()
    def send(self, *args, body, **more):
        self.bodies += zlib.decompress(body, 31)
        self.sent.set()
        return Reply(200, b"")
    def failover(self): pass
    def close(self): pass
    def abort(self): pass

recorder, transport = Recorder(64), Transport()
exporter = Exporter(HookConfig(endpoints=("http://unused",)), recorder, {}, transport=transport)
recorder.append(Record("parent"))
child = os.fork()
if child == 0:
    exporter.stop(1.0)          # nothing to stop here, and no hang
    exporter.start()            # the parent's records are not ours
    recorder.append(Record("child"))
    ok = transport.sent.wait(20)
    alive = [thread.name for thread in threading.enumerate()].count("kvguard-export")
    exporter.stop(5.0)
    ok = ok and b'"child"' in transport.bodies and b'"parent"' not in transport.bodies
    os._exit(0 if ok and alive == 1 and exporter.dropped == 0 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (0 if len(recorder) == 1 else 2))
"""


def test_a_forked_child_has_its_own_thread_and_none_of_the_parents_records():
    done = subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False)
    assert done.returncode == 0


def test_nothing_heavy_is_imported_late():
    """Once the modules are in, an export and a poll import nothing more (imports hold the GIL)."""
    script = """
import sys
from guard.hook.config import HookConfig
from guard.hook.directives import Directives
from guard.hook.exporter import Exporter
from guard.hook.recorder import Recorder
before = set(sys.modules)
class Record:
    def spans(self):
        return []
recorder = Recorder(8)
recorder.append(Record())
config = HookConfig(endpoints=("http://127.0.0.1:9",))
Exporter(config, recorder, {}).step()
Directives(config, "h:1/0", ["b"], "m").poll()
late = set(sys.modules) - before
assert not late, late
assert not {name.split(".")[0] for name in sys.modules} & {"vllm", "opentelemetry", "numpy", "requests", "urllib3"}
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], timeout=60, check=False, cwd=Path(guard.__file__).parents[1]
    )
    assert done.returncode == 0
