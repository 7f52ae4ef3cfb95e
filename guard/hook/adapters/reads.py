"""One span per operation against the store, where LMCache runs inside vLLM's worker.

Which request an operation belongs to is carried by a context variable: LMCache's engine methods set it (they know the
request), asyncio copies it into the coroutine that they submit, and the connector's job queue, which would lose it, is
given it along with the job. The operations themselves are seen at the store's client, so that their number is that of
the store's own statistics: a chunk in Redis takes two GETs.

A lookup reads before the scheduler's step has told the worker the trace of the request. Such a record waits in the
ring: `spans()` puts it back until the trace is known.
"""

import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from guard import semconv
from guard.hook.envelope import Context
from guard.hook.failsafe import logger
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.spans import make_span, new_id, new_rng
from guard.hook.worker import Contexts, Owner
from guard.wire import AttributeValue, Span

LOOKUP: Final = "lookup"
FETCH: Final = "fetch"
STORE: Final = "store"

WAIT_NS: Final = 60 * 10**9
"""How long a read waits for the trace of its request; after that it is told with a trace of its own."""

CLIENTS: Final = ("connection", "client")
READS: Final = frozenset({
    "get", "mget", "exists", "exists_sync", "batch_get", "batch_exists", "batch_exists_sync", "strlen",
})  # fmt: skip

_ENGINE: Final = {
    "lookup": ("lookup_id", LOOKUP),
    "async_lookup_and_prefetch": ("lookup_id", LOOKUP),
    "retrieve": ("req_id", FETCH),
    "store": ("req_id", STORE),
}

_rng = new_rng()
_current: ContextVar[tuple[str, str] | None] = ContextVar("kvguard_current", default=None)
_sink: "Sink | None" = None


@dataclass(slots=True)
class Sink:
    """Where records go and what they say of this process."""

    recorder: Recorder
    scope: Scope
    backend: Backend
    rank: int
    contexts: Contexts


@dataclass(slots=True)
class ReadRecord:
    """One operation against the store, or one store of a request's chunks."""

    sink: Sink
    phase: str
    request_id: str
    operation: str
    keys: int
    size: int
    start: int
    end: int
    anchor: int
    failed: bool
    span_id: int
    parent_id: int

    def spans(self) -> Iterator[Span]:
        """One span; none yet while the trace of the request is not known."""
        sink = self.sink
        context = sink.contexts.get(self.request_id)
        if context is None:
            if time.monotonic_ns() - self.end < WAIT_NS:
                sink.recorder.append(self)
                return
            context = Context(self.request_id, new_id(128, _rng), True, 0, 0)
        parent = self.parent_id
        if self.phase == LOOKUP:
            parent = context.lookup_span
        elif self.phase == FETCH and not parent:
            parent = sink.contexts.fetch_span(self.request_id)
        ids = sink.scope.ids(self.request_id)
        attributes: dict[str, AttributeValue] = {
            semconv.INTERNAL_ID: ids[semconv.INTERNAL_ID],
            semconv.ENGINE_ID: sink.scope.engine_id,
            semconv.BACKEND: sink.backend.label,
            semconv.OPERATION: self.operation,
            semconv.KEYS: self.keys,
            semconv.RANK: sink.rank,
            semconv.OUTCOME: semconv.OUTCOME_FAILED if self.failed else semconv.OUTCOME_OK,
        }
        if self.size >= 0:
            attributes[semconv.BYTES] = self.size
        if sink.backend.address:
            attributes[semconv.SERVER_ADDRESS] = sink.backend.address
            if sink.backend.port:
                attributes[semconv.SERVER_PORT] = sink.backend.port
        name = semconv.SPAN_STORE if self.phase == STORE else semconv.SPAN_READ
        owner = Owner(context.trace_id, context.sampled, self.anchor)
        span = make_span(owner, name, self.span_id, parent or context.request_span, self.start, self.end, attributes, 3)
        span.error = self.failed
        yield span


def install() -> None:
    """Wraps LMCache's engine methods and its maker of remote connectors, once per process.

    Logs and leaves everything as it is where LMCache does not look as expected.
    """
    from lmcache.v1 import cache_engine
    from lmcache.v1.storage_backend import remote_backend

    if getattr(remote_backend.CreateConnector, "_kvguard", False):
        return
    create = remote_backend.CreateConnector

    def create_connector(*args: Any, **kwargs: Any) -> Any:
        made = create(*args, **kwargs)
        try:
            _instrument(made)
        except Exception as error:  # noqa: BLE001  LMCache goes on, unseen
            logger.warning("kvguard: reads of %s cannot be seen: %s", type(made).__name__, error)
        return made

    create_connector._kvguard = True  # type: ignore[attr-defined]
    remote_backend.CreateConnector = create_connector
    engine = cache_engine.LMCacheEngine
    for name, (key, phase) in _ENGINE.items():
        method = getattr(engine, name, None)
        if method is not None:
            setattr(engine, name, _within(method, key, phase))


def connect(recorder: Recorder, scope: Scope, backend: Backend, rank: int, contexts: Contexts) -> None:
    """From now on operations are recorded."""
    global _sink  # noqa: PLW0603  one per process, as LMCache's engine is
    _sink = Sink(recorder, scope, backend, rank, contexts)


def _within(method: Callable[..., Any], key: str, phase: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _current.set((phase, str(kwargs.get(key) or "")))
        try:
            return method(self, *args, **kwargs)
        finally:
            _current.reset(token)

    call.__name__ = method.__name__
    call.__doc__ = method.__doc__
    return call


def _instrument(connector: Any) -> None:
    while hasattr(connector, "getWrappedConnector"):
        connector = connector.getWrappedConnector()
    executor = getattr(connector, "pq_executor", None)
    if executor is not None:
        executor.submit_job = _carrying(executor.submit_job)
    seen = False
    for name in CLIENTS:
        client = getattr(connector, name, None)
        if client is not None:
            setattr(connector, name, _Client(client))
            seen = True
    if not seen:  # a store without a client object that we know: one span per call of the connector
        for name in ("get", "exists", "batched_get", "batched_contains", "batched_get_non_blocking"):
            if hasattr(connector, name):
                setattr(connector, name, _timed(name, getattr(connector, name)))
    for name in ("put", "batched_put"):
        if hasattr(connector, name):
            setattr(connector, name, _timed(name, getattr(connector, name)))


def _carrying(submit: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Gives a job the context of its submitter: the queue's own tasks have none."""

    async def submit_job(job: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        current = _current.get()

        async def carried(*job_args: Any, **job_kwargs: Any) -> Any:
            token = _current.set(current)
            try:
                return await job(*job_args, **job_kwargs)
            finally:
                _current.reset(token)

        return await submit(carried, *args, **kwargs)

    return submit_job


class _Client:
    """Stands before a store's client: its reading methods are timed, everything else passes through."""

    def __init__(self, client: Any) -> None:
        self.__dict__["_client"] = client

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_client"], name)
        if name in READS:
            value = _timed(name, value)
            self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_client"], name, value)


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if current is None or _sink is None:
            return method(*args, **kwargs)
        start = time.monotonic_ns()
        try:
            result = method(*args, **kwargs)
        except BaseException:
            _note(current, name, args, None, start, failed=True)
            raise
        if inspect.isawaitable(result):
            return _awaited(result, current, name, args, start)
        _note(current, name, args, result, start, failed=False)
        return result

    return call


async def _awaited(result: Awaitable[Any], current: tuple[str, str], name: str, args: Any, start: int) -> Any:
    try:
        value = await result
    except BaseException:
        _note(current, name, args, None, start, failed=True)
        raise
    _note(current, name, args, value, start, failed=False)
    return value


def _note(current: tuple[str, str], name: str, args: Any, value: Any, start: int, *, failed: bool) -> None:
    sink = _sink
    if sink is None:
        return
    try:
        phase, request_id = current
        keys = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
        fetch = sink.contexts.fetch_span(request_id) if phase == FETCH else 0
        sink.recorder.append(
            ReadRecord(
                sink, phase, request_id, name, keys, _size(args, value), start, time.monotonic_ns(),
                time.time_ns() - time.monotonic_ns(), failed, new_id(64, _rng), fetch,
            )
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  never into LMCache
        logger.debug("kvguard: a read was not recorded: %s", error)


def _size(args: Any, value: Any) -> int:
    """Bytes that were read or written, -1 where the call does not tell."""
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if len(args) < 2:
        return -1
    buffers = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    total = 0
    for buffer in buffers:
        if isinstance(buffer, bytes | bytearray | memoryview):
            total += memoryview(buffer).nbytes
        elif hasattr(buffer, "get_size"):
            total += int(buffer.get_size())
        else:
            return -1
    return total


def installed() -> bool:
    """Whether LMCache is loaded and wrapped in this process."""
    module = sys.modules.get("lmcache.v1.storage_backend.remote_backend")
    return bool(getattr(getattr(module, "CreateConnector", None), "_kvguard", False))
