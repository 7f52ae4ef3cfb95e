"""Reads inside the process: counted one by one at the store's client, under the span that caused them."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from guard import semconv
from guard.connectors import LMCACHE
from guard.hook.adapters import reads
from guard.hook.envelope import Context, Envelope, Load
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.worker import Contexts
from guard.wire import Span


class Redis:
    """An asyncio client; `ping` is not a read."""

    def __init__(self) -> None:
        self.data = {"k": b"12345"}

    async def get(self, key: str) -> bytes | None:
        await asyncio.sleep(0)
        if key == "boom":
            raise ConnectionError(key)
        return self.data.get(key)

    async def exists(self, key: str) -> int:
        return int(key in self.data)

    async def ping(self) -> bool:
        return True


class Executor:
    """A job queue whose tasks lose the submitter's context, as LMCache's does."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.worker = asyncio.ensure_future(self._work())

    async def submit_job(self, job: Any, *args: Any, **kwargs: Any) -> Any:
        done = asyncio.get_running_loop().create_future()
        kwargs.pop("priority", None)
        await self.queue.put((job, args, kwargs, done))
        return await done

    async def _work(self) -> None:
        while True:
            job, args, kwargs, done = await self.queue.get()
            try:
                done.set_result(await job(*args, **kwargs))
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)


class Connector:
    def __init__(self) -> None:
        self.connection = Redis()
        self.pq_executor = Executor()

    async def _get(self, key: str) -> Any:
        await self.connection.get(key)
        return await self.connection.get(key)

    async def get(self, key: str) -> Any:
        return await self.pq_executor.submit_job(self._get, key=key, priority=1)

    async def exists(self, key: str) -> Any:
        return await self.connection.exists(key)

    async def put(self, key: str, value: Any) -> None:
        await self.connection.ping()


class Instrumented:
    def __init__(self, connector: Connector) -> None:
        self.inner = connector

    def getWrappedConnector(self) -> Connector:  # noqa: N802
        return self.inner


class Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def close(self) -> None:
        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> reads.Sink:
    backend = Backend(label="lmcache/redis", capability=LMCACHE)
    made = reads.Sink(Recorder(), Scope("h:1/0", "m"), backend, 1, Contexts())
    monkeypatch.setattr(reads, "_sink", made)
    return made


def spans(sink: reads.Sink) -> list[Span]:
    return [span for record in sink.recorder.drain(100) for span in record.spans()]


async def build() -> Connector:
    connector = Connector()
    reads._instrument(Instrumented(connector))
    return connector


class Engine:
    """LMCache's engine: knows the request, hands the work to the loop."""

    def __init__(self, loop: Loop, connector: Connector) -> None:
        self.loop = loop
        self.connector = connector

    def lookup(self, key: str, *, lookup_id: str) -> Any:
        return self.loop.run(self.connector.exists(key))

    def retrieve(self, key: str, *, req_id: str) -> Any:
        return self.loop.run(self.connector.get(key))

    def store(self, key: str, *, req_id: str) -> Any:
        return self.loop.run(self.connector.put(key, SimpleNamespace(get_size=lambda: 77)))


def wrapped(name: str) -> Any:
    key, phase = reads._ENGINE[name]
    return reads._within(getattr(Engine, name), key, phase)


CONTEXT = Context("r1", 0xAB, True, 0x1, 0x2)


def test_each_operation_of_a_fetch_is_one_span_under_it(loop: Loop, sink: reads.Sink) -> None:
    engine = Engine(loop, loop.run(build()))
    sink.contexts.add(Envelope((CONTEXT,), (Load("r1", 0x7, 1, 256, False),), 5))
    assert wrapped("retrieve")(engine, "k", req_id="r1") == b"12345"
    found = spans(sink)
    assert [span.name for span in found] == [semconv.SPAN_READ] * 2
    for span in found:
        assert (span.trace_id, span.parent_id) == (f"{0xAB:032x}", f"{7:016x}")
        assert span.attributes[semconv.OPERATION] == "get"
        assert (span.attributes[semconv.KEYS], span.attributes[semconv.BYTES]) == (1, 5)
        assert span.attributes[semconv.RANK] == 1


def test_a_lookups_reads_wait_for_the_trace_of_their_request(loop: Loop, sink: reads.Sink) -> None:
    engine = Engine(loop, loop.run(build()))
    assert wrapped("lookup")(engine, "k", lookup_id="r1") == 1
    assert spans(sink) == []
    assert len(sink.recorder) == 1  # put back
    sink.contexts.add(Envelope((CONTEXT,), (), 0))
    (span,) = spans(sink)
    assert (span.parent_id, span.attributes[semconv.OPERATION]) == (f"{2:016x}", "exists")
    assert len(sink.recorder) == 0


def test_a_read_whose_request_never_comes_is_told_in_the_end(
    loop: Loop, sink: reads.Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loop, loop.run(build()))
    wrapped("lookup")(engine, "k", lookup_id="gone")
    monkeypatch.setattr(reads, "WAIT_NS", -1)
    (span,) = spans(sink)
    assert span.parent_id == ""
    assert span.attributes[semconv.INTERNAL_ID] == "gone"


def test_a_failed_read_is_told_and_its_error_passes(loop: Loop, sink: reads.Sink) -> None:
    engine = Engine(loop, loop.run(build()))
    sink.contexts.add(Envelope((CONTEXT,), (), 0))
    with pytest.raises(ConnectionError, match="boom"):
        wrapped("retrieve")(engine, "boom", req_id="r1")
    (span,) = spans(sink)
    assert span.error
    assert span.attributes[semconv.OUTCOME] == "failed"


def test_a_store_is_one_span_and_other_operations_none(loop: Loop, sink: reads.Sink) -> None:
    engine = Engine(loop, loop.run(build()))
    sink.contexts.add(Envelope((CONTEXT,), (), 0))
    wrapped("store")(engine, "k", req_id="r1")
    (span,) = spans(sink)
    assert (span.name, span.attributes[semconv.BYTES]) == (semconv.SPAN_STORE, 77)
    assert loop.run(engine.connector.exists("k")) == 1  # no request: a health check
    assert spans(sink) == []


def test_batches_and_buffers_are_counted(sink: reads.Sink) -> None:
    sink.contexts.add(Envelope((CONTEXT,), (), 0))
    client = reads._Client(SimpleNamespace(batch_get=lambda keys, buffers: None, name="resp"))
    token = reads._current.set((reads.FETCH, "r1"))
    try:
        client.batch_get(["a", "b", "c"], [bytearray(10), memoryview(bytearray(20)), bytearray(30)])
    finally:
        reads._current.reset(token)
    (span,) = spans(sink)
    assert (span.attributes[semconv.KEYS], span.attributes[semconv.BYTES]) == (3, 60)
    client.name = "other"
    assert client.name == "other"


def test_nothing_is_recorded_before_the_connector_is_attached(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_sink", None)
    engine = Engine(loop, loop.run(build()))
    assert wrapped("retrieve")(engine, "k", req_id="r1") == b"12345"
