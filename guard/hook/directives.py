"""Long-polls the service for this engine's directives and holds them for the gate, as leases.

A directive is applied while its lease runs. Only an answer of the service renews it: 200 with a readable set, or 304.
Everything else (no service, a stopped one, an error status, garbage, a newer schema) lets the lease run out, and then
`current` answers None: vLLM behaves as without kvguard. The exception is the operator's: an override with
`on_lease_expiry: keep` holds for its `ttl_seconds` (None: as long as this process lives), whatever happens.

Acknowledgement: `If-None-Match` names the set that is applied at the moment of the request. It is sent with the next
poll, which follows at once, and never for a set whose lease has run out, or once the failsafe has tripped: then nothing
is applied any more, and the operator must see it.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import quote, urlencode

from guard import __version__, semconv
from guard.errors import WireError
from guard.hook.config import HookConfig
from guard.hook.failsafe import Failsafe, logger
from guard.hook.outages import Backoff, Complaints, described
from guard.hook.thread import Worker
from guard.hook.transport import HttpTransport, Reply, Transport
from guard.wire import Directive, DirectiveSet

WAIT_SECONDS: Final = 5
"""How long the service may hold a poll; it answers 304 then, which renews the lease."""

READ_MARGIN: Final = 5.0
BODY_LIMIT: Final = 256 * 1024
GOODBYE_SECONDS: Final = 0.2
_ETAG_LIMIT: Final = 256
_QUICK_SECONDS: Final = 0.05
_QUICK_FREE: Final = 8
_QUICK_PAUSES: Final = {True: 0.05, False: 0.5}  # by whether the answer brought something new

_Table = dict[str, tuple[Directive, float]]


class Directives:
    """The directives of one engine. `current` is for engine threads; all else happens on one thread of its own."""

    def __init__(
        self,
        config: HookConfig,
        engine_id: str,
        backends: Sequence[str],
        model: str,
        *,
        failsafe: Failsafe | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._engine_id = engine_id
        query = [("wait", str(WAIT_SECONDS)), ("schema", str(semconv.SCHEMA))]
        query += [("backend", name) for name in backends]
        query += [
            ("model", model),
            ("hook", __version__),
            ("instance", config.instance or engine_id.rpartition("/")[0]),
        ]
        self._engine_path = f"/v1/directives/{quote(engine_id, safe='/')}"
        self._path = f"{self._engine_path}?{urlencode(query)}"
        self._failsafe = failsafe or Failsafe()
        self._transport = transport or HttpTransport(config)
        self._clock = clock
        self._backoff = Backoff(len(config.endpoints), first=0.1, longest=2.0, rng=rng or random.Random())  # noqa: S311
        self._complaints = Complaints(clock)
        self._worker = Worker("kvguard-directives", self._run)
        self._table: _Table = {}  # replaced as a whole, never changed: readers need no lock
        self._applied: DirectiveSet | None = None
        self._keep_until: dict[str, float] = {}
        self._lease_until = float("-inf")
        self._heard: float | None = None
        self._quick = 0
        self._leaving = False
        self._goodbye = self._engine_path

    def current(self, backend: str) -> Directive | None:
        """The directive in force for a backend, or None: behave as without kvguard. No lock, no I/O."""
        entry = self._table.get(backend)
        return entry[0] if entry is not None and self._clock() < entry[1] else None

    def age(self) -> float | None:
        """Seconds since the service last confirmed directives, None where it never has. No lock, no I/O."""
        heard = self._heard
        return None if heard is None else max(0.0, self._clock() - heard)

    def start(self) -> None:
        """Starts polling, once per process."""
        self._worker.start(os.getpid())

    def stop(self, timeout: float = 2.0, *, leaving: bool = False, error: str = "") -> None:
        """Stops polling; directives that are in force run out by themselves.

        `leaving`: the engine ends, which the service is told, so that nobody is alarmed when it polls no more. `error`
        names what it ends of when that was not planned: then somebody shall be.
        """
        self._leaving = leaving
        self._goodbye = f"{self._engine_path}?{urlencode({'error': error})}" if error else self._engine_path
        self._worker.signal()
        self._transport.abort()
        self._worker.join(os.getpid(), timeout)

    def poll(self) -> float:
        """Asks once and applies the answer; returns the seconds to wait before the next poll (0: at once)."""
        began = self._clock()
        headers = {"Accept": "application/json"}
        if self._applied is not None and began < self._lease_until and not self._failsafe.tripped:
            headers["If-None-Match"] = _quoted(self._applied.etag)
        try:
            reply = self._transport.send(
                "GET", self._path, headers=headers, body=None, timeout=WAIT_SECONDS + READ_MARGIN, limit=BODY_LIMIT
            )
            news = self._take(reply, "If-None-Match" in headers)
        except (OSError, WireError) as error:
            if self._worker.stopping:
                return 0.0
            self._complaints.say(type(error).__name__, "kvguard: no directives: %s", error)
            self._transport.failover()
            return self._backoff.failed(None)
        if reply.status not in (200, 304):
            self._complaints.say(
                str(reply.status), "kvguard: directives: the service answered %s", described(reply.status)
            )
            self._transport.failover()
            return self._backoff.failed(reply.retry_after)
        self._backoff.succeeded()
        return self._pace(began, news)

    def _take(self, reply: Reply, tagged: bool) -> bool:
        """Applies an answer; tells whether it is another set than before."""
        now, before = self._clock(), self._applied
        if reply.status == 200:
            applied = _read(reply.body, self._engine_id)
            self._applied = applied
            self._keep_until = {item.backend: _keep_until(item, now) for item in applied.directives}
            self._renew(applied, now)
        elif reply.status == 304:
            if self._applied is None or not tagged:
                raise WireError("the service answered 304 to a question without a tag")
            self._renew(self._applied, now)
        return self._applied != before

    def _renew(self, applied: DirectiveSet, now: float) -> None:
        self._heard = now
        self._table = {
            item.backend: (item, max(now + item.lease_seconds, self._keep_until[item.backend]))
            for item in applied.directives
        }
        self._lease_until = now + min((item.lease_seconds for item in applied.directives), default=float("inf"))

    def _pace(self, began: float, news: bool) -> float:
        """A service that answers at once, again and again, is slowed down; some changes in a row are not."""
        if self._failsafe.tripped:  # no tag is sent, so the service never holds the poll
            return float(WAIT_SECONDS)
        if self._clock() - began >= _QUICK_SECONDS:
            self._quick = 0
            return 0.0
        self._quick += 1
        return _QUICK_PAUSES[news] if self._quick > _QUICK_FREE else 0.0

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                wait = self.poll()
            except Exception as error:  # noqa: BLE001  the thread's outermost frame
                if stop.is_set():
                    break
                self._failsafe.record("directives", error, own_thread=True)
                wait = self._backoff.failed(None)
            if wait > 0.0:
                stop.wait(wait)
        if self._leaving:
            self._say_goodbye()
        self._transport.close()

    def _say_goodbye(self) -> None:
        for _ in range(2):  # `stop` may cut the first one off, which it takes for a poll
            try:
                self._transport.send(
                    "DELETE", self._goodbye, headers={}, body=None, timeout=GOODBYE_SECONDS, limit=BODY_LIMIT
                )
            except Exception as error:  # noqa: BLE001  what nobody waits for must not end the thread with a traceback
                logger.debug("kvguard: no goodbye: %r", error)
                continue
            return


def _keep_until(directive: Directive, now: float) -> float:
    if directive.on_lease_expiry != semconv.LEASE_KEEP:
        return float("-inf")
    return float("inf") if directive.ttl_seconds is None else now + directive.ttl_seconds


def _quoted(tag: str) -> str:
    """The tag as HTTP wants it."""
    return tag if tag.startswith(('"', 'W/"')) else f'"{tag}"'


def _read(body: bytes, engine_id: str) -> DirectiveSet:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError("directives: not JSON") from error
    found = DirectiveSet.from_json(data)
    if found.engine_id != engine_id:
        raise WireError("directives: for another engine")
    etag = found.etag
    if not etag or len(etag) > _ETAG_LIMIT or not etag.isascii() or not etag.isprintable():
        raise WireError("directives: the tag cannot be sent back")
    return found
