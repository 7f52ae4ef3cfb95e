"""The engines that poll for directives, and the long poll that wakes them at once.

A poll registers the engine. Its `If-None-Match` is the tag of the set that the hook has applied: the acknowledgement.
The registry is bounded, and a silent engine is forgotten after a while. All of it runs in the event loop.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from guard import semconv
from guard.control.shapes import Plan
from guard.service import offload
from guard.wire import LEASE_SECONDS, Directive, DirectiveSet, Event

MAX_WAIT: Final = 5.0
"""Longest long poll, seconds; its answer renews the lease."""

MAX_BACKENDS: Final = 16
_REMEMBERED: Final = 8  # sets that a hook may still have applied when it polls


class Clock(NamedTuple):
    """Unix time for what is shown and stored, and a monotonic time for ages; seconds."""

    wall: Callable[[], float]
    monotonic: Callable[[], float]


class Poll(NamedTuple):
    """What a hook says of itself when it polls. `applied` is the tag it sends, or empty."""

    engine_id: str
    model: str = ""
    backends: tuple[str, ...] = ()
    hook: str = ""
    instance: str = ""
    applied: str = ""


@dataclass(slots=True)
class Engine:
    """One engine as its polls told it. `seen` is monotonic, `applied` maps a backend to (directive id, Unix time)."""

    poll: Poll
    seen: float
    tag: str = ""
    held: tuple[Directive, ...] = ()  # what is in force, as of the tag
    ids: dict[str, str] = field(default_factory=dict)  # backend -> id of the directive in force
    sent: dict[str, dict[str, str]] = field(default_factory=dict)  # tag -> ids, what the hook may have applied
    applied: dict[str, tuple[str, float]] = field(default_factory=dict)
    waiting: int = 0
    told: str = ""  # what was last told of its presence
    crashed: bool = False  # it said so itself
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def acknowledged(self) -> bool:
        """Whether the hook has applied everything that is in force for it."""
        return all(self.applies(backend) for backend in self.ids)

    def applies(self, backend: str) -> bool:
        """Whether the hook has applied the directive in force for `backend`."""
        return self.applied.get(backend, ("",))[0] == self.ids.get(backend)


class RegistryFullError(Exception):
    """There are as many live engines as the registry holds."""


class Registry:
    """The engines, what is in force for each, and who waits for a change."""

    def __init__(
        self, overrides: offload.Overrides, clock: Clock, *, max_engines: int, retention_seconds: float
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.plans: Callable[[str, str], Plan | None] = lambda _engine, _backend: None  # the controller's, when it runs
        self._overrides = overrides
        self._clock = clock
        self._max = max_engines
        self._retention = retention_seconds
        self._closing = False
        self._left: list[Event] = []  # of engines that said goodbye, until they are told

    async def poll(self, poll: Poll, wait: float) -> DirectiveSet | None:
        """The set for the engine as soon as it differs from what the hook has applied; None: no news after `wait`.

        Raises:
            RegistryFullError: the engine is new and there is no room for it.
        """
        engine = self._register(poll)
        if engine.tag == poll.applied and not self._closing:
            engine.waiting += 1
            try:
                async with asyncio.timeout(min(max(wait, 0.0), MAX_WAIT)):
                    await engine.changed.wait()
            except TimeoutError:
                pass
            finally:
                engine.waiting -= 1
                engine.seen = self._clock.monotonic()
        if engine.tag == poll.applied:
            return None
        held = engine.held  # worked out once for the tag; only what is left of a switch's time runs down meanwhile
        if any(item.ttl_seconds is not None for item in held):
            held = self.directives(engine)
        return DirectiveSet(engine_id=poll.engine_id, etag=engine.tag, directives=held)

    def publish(self, changed: Iterable[str] | None = None) -> None:
        """Works out what is in force for the engines `changed` (ids; None: all) and wakes polls where it is new."""
        for engine_id in self.engines if changed is None else changed:
            if engine := self.engines.get(engine_id):
                self._update(engine)

    def directives(self, engine: Engine) -> tuple[Directive, ...]:
        """What is asked of `engine` now, a directive per backend."""
        poll, now = engine.poll, self._clock.wall()
        return tuple(
            offload.directive(
                poll.engine_id,
                backend,
                self._overrides.resolve(poll.engine_id, poll.model, backend, now),
                now,
                self.plans(poll.engine_id, backend),
                self._overrides.default_mode,
            )
            for backend in poll.backends
        )

    def asked(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Id, model and backends of every engine that is not silent."""
        return [
            (engine.poll.engine_id, engine.poll.model, engine.poll.backends)
            for engine in self.engines.values()
            if not self.silent(engine)
        ]

    def age(self, engine: Engine) -> float:
        """Seconds since the hook was last heard of; 0 while it waits in a poll."""
        return 0.0 if engine.waiting else max(0.0, self._clock.monotonic() - engine.seen)

    def silent(self, engine: Engine) -> bool:
        """Whether the hook was not heard of for longer than a lease, or said that its engine crashed."""
        return engine.crashed or self.age(engine) > LEASE_SECONDS

    def concerned(self, scope: str) -> list[Engine]:
        """The live engines that `scope` covers."""
        return [
            engine
            for engine in self.engines.values()
            if not self.silent(engine)
            and offload.matches(scope, engine.poll.engine_id, engine.poll.model, engine.poll.backends)
        ]

    def news(self) -> list[Event]:
        """The engines that came, left, fell silent or came back since this was last asked."""
        found, self._left = self._left, []
        for engine in self.engines.values():
            now = "silent" if self.silent(engine) else "here"
            if now != engine.told:
                what = "polls" if not engine.told else "fell silent" if now == "silent" else "polls again"
                found.append(self._event(engine, what))
                engine.told = now
        return found

    def leave(self, engine_id: str, error: str = "") -> None:
        """The engine ends and says so: it is forgotten at once. One that nobody knows has left already.

        With an `error`, it was not meant to end: it is kept, and silent from now on, until it polls again or is
        forgotten as any silent engine is.
        """
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        if not error:
            del self.engines[engine_id]
            self._left.append(self._event(engine, "left"))
        elif not engine.crashed:
            engine.crashed, engine.told = True, "silent"
            self._left.append(self._event(engine, f"crashed: {error}", error=error))
        self._wake(engine)

    def forget_silent(self) -> None:
        """Drops engines that were silent for longer than the retention."""
        for engine_id, engine in list(self.engines.items()):
            if self.age(engine) > self._retention:
                del self.engines[engine_id]

    def close(self) -> None:
        """Ends every waiting poll, now and from now on: the service stops."""
        self._closing = True
        for engine in self.engines.values():
            self._wake(engine)

    def _event(self, engine: Engine, what: str, **more: str) -> Event:
        poll = engine.poll
        evidence = {
            "model": poll.model, "backends": list(poll.backends), "hook": poll.hook, "instance": poll.instance, **more,
        }  # fmt: skip
        return Event(
            at=self._clock.wall(), kind=semconv.EVENT_ENGINE, scope=f"engine:{poll.engine_id}",
            message=f"engine {poll.engine_id} {what}", evidence=evidence,
        )  # fmt: skip

    def _register(self, poll: Poll) -> Engine:
        engine = self.engines.get(poll.engine_id)
        if engine is None:
            self._make_room()
            engine = self.engines[poll.engine_id] = Engine(poll, self._clock.monotonic())
            self._update(engine)
        elif engine.poll[:3] != poll[:3]:
            engine.poll = poll
            self._update(engine)
        engine.poll = poll
        engine.crashed = False
        engine.seen = self._clock.monotonic()
        self._acknowledge(engine, poll.applied)
        return engine

    def _make_room(self) -> None:
        if len(self.engines) < self._max:
            return
        oldest = max(self.engines.values(), key=self.age)
        if not self.silent(oldest):
            raise RegistryFullError
        del self.engines[oldest.poll.engine_id]

    def _update(self, engine: Engine) -> None:
        directives = self.directives(engine)
        tag = offload.etag(directives)
        if tag != engine.tag:
            engine.tag, engine.held = tag, directives
            engine.ids = {item.backend: item.id for item in directives}
            engine.sent.pop(tag, None)
            engine.sent[tag] = engine.ids
            while len(engine.sent) > _REMEMBERED:
                del engine.sent[next(iter(engine.sent))]
            self._wake(engine)

    def _acknowledge(self, engine: Engine, tag: str) -> None:
        ids = engine.sent.get(tag, {})
        now = self._clock.wall()
        engine.applied = {
            backend: known
            if (known := engine.applied.get(backend)) and known[0] == directive_id
            else (directive_id, now)
            for backend, directive_id in ids.items()
        }

    def _wake(self, engine: Engine) -> None:
        waiting, engine.changed = engine.changed, asyncio.Event()
        waiting.set()
