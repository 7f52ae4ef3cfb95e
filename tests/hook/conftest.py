"""A kvguard service that answers as it is told, and a clock that stands still until it is told."""

import gzip
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from guard.hook import attach
from guard.hook.recorder import Recorder
from tests.hook.fake_runtime import FakeRuntime, Make, new

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    peer: tuple[str, int]


class FakeService:
    """`reply` decides every answer; `seen` holds every request with its body unpacked."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.reply: Callable[[Seen], Answer] = lambda _: (200, {}, b"{}")
        self._changed = threading.Condition()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                headers = {key.lower(): value for key, value in self.headers.items()}
                request = Seen(self.command, self.path, headers, body, self.client_address)
                status, answer_headers, answer = service.reply(request)
                with service._changed:
                    service.seen.append(request)
                    service._changed.notify_all()
                self.send_response(status)
                for key, value in answer_headers.items():
                    self.send_header(key, value)
                if status != 304:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                if status != 304:
                    self.wfile.write(answer)

            do_GET = do_POST = do_DELETE = _any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # a client that goes away is what some tests do

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait_for(self, count: int, timeout: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, timeout), f"{len(self.seen)} of {count}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class FakeClock:
    def __init__(self, now: float = 1000.0, per_call: float = 0.0) -> None:
        self.now = now
        self.per_call = per_call

    def __call__(self) -> float:
        self.now += self.per_call
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def new_service() -> Iterator[Callable[[], FakeService]]:
    started: list[FakeService] = []

    def start() -> FakeService:
        started.append(FakeService())
        return started[-1]

    yield start
    for service in started:
        service.close()


@pytest.fixture
def service(new_service: Callable[[], FakeService]) -> FakeService:
    return new_service()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def new_clock() -> type[FakeClock]:
    return FakeClock


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """What guarded connectors of this process share."""
    made = FakeRuntime()
    monkeypatch.setattr(attach, "runtime_for", lambda config: made)
    return made


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """As `runtime`, which errors do not make step aside so soon."""
    made = FakeRuntime(limit=1000)
    monkeypatch.setattr(attach, "runtime_for", lambda config: made)
    return made


@pytest.fixture
def make(runtime: FakeRuntime) -> Make:
    """Makes guarded connectors in `runtime`."""
    return new


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(1024)
