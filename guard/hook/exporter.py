"""Drains the ring of records and sends them to the service as OTLP/JSON, on one thread, without disturbing vLLM.

The thread shares the GIL with the engine. It works in slices: after `SLICE_SPANS` spans or `SLICE_SECONDS`, whichever
comes first, it lets go of the GIL for `YIELD_SECONDS`. Compression (zlib, as the spans come, so that no large text is
ever built) and the network release it by themselves.

At most one batch is in hand. While the service cannot take it the records wait in the ring, which drops its oldest;
a batch that could not be sent for `RETRY_SECONDS` is dropped, so that what arrives after an outage is fresh. All
losses are counted and told with the next batch (`kvguard.hook.records_dropped`, a running total of this process).
"""

import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from guard import semconv
from guard.hook.config import HookConfig
from guard.hook.failsafe import Failsafe
from guard.hook.otlp_json import TAIL, encode_span, head
from guard.hook.outages import Backoff, Complaints, described
from guard.hook.recorder import Record, Recorder
from guard.hook.thread import Worker
from guard.hook.transport import HttpTransport, Transport

DRAIN_SECONDS: Final = 0.2
"""Longest wait between two looks at the ring."""

SLICE_SPANS: Final = 16
SLICE_SECONDS: Final = 0.0005
YIELD_SECONDS: Final = 0.0005
BATCH_RECORDS: Final = 256
RETRY_SECONDS: Final = 30.0
SEND_TIMEOUT: Final = 5.0
REPLY_LIMIT: Final = 1 << 16
NEWS_SECONDS: Final = 1.0
"""Shortest time between two requests that carry counters only."""

_REFUSED: Final = frozenset({400, 413, 415, 422})
"""Answers that would be the same the next time."""

_HEADERS: Final = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Accept": "application/json"}


@dataclass(slots=True)
class _Batch:
    body: bytes
    records: int  # those that it tells; others went back into the ring to wait for more
    counts: tuple[int, int, str]  # lost records, errors and reads in flight that it tells
    made: float


class _Slices:
    """Lets go of the GIL after every slice of work."""

    def __init__(self, clock: Callable[[], float], pause: Callable[[float], None]) -> None:
        self._clock = clock
        self._pause = pause
        self._began = clock()
        self._spans = 0

    def did_one(self) -> None:
        """Counts one encoded span."""
        self._spans += 1
        if self._spans >= SLICE_SPANS or self._clock() - self._began >= SLICE_SECONDS:
            self._pause(YIELD_SECONDS)
            self._began = self._clock()
            self._spans = 0


class Exporter:
    """Sends what the recorder holds to the service. One per process; `resource` describes that process."""

    def __init__(
        self,
        config: HookConfig,
        recorder: Recorder,
        resource: Mapping[str, str | int],
        *,
        failsafe: Failsafe | None = None,
        live: Callable[[], str] = lambda: "",
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._recorder = recorder
        self._resource = dict(resource)
        self._failsafe = failsafe or Failsafe()
        self._live = live
        self._transport = transport or HttpTransport(config)
        self._clock = clock
        self._pause = pause
        self._backoff = Backoff(len(config.endpoints), first=0.2, longest=5.0, rng=rng or random.Random())  # noqa: S311
        self._complaints = Complaints(clock)
        self._worker = Worker("kvguard-export", self._run)
        self._pid = os.getpid()
        self._batch: _Batch | None = None
        self._lost = 0
        self._not_before = 0.0
        self._told: tuple[int, int, str] = (0, 0, "")
        self._told_at = float("-inf")

    @property
    def dropped(self) -> int:
        """Records lost in this process so far: the ring was full, or the service did not take them."""
        return self._recorder.dropped + self._lost

    def start(self) -> None:
        """Starts the thread, once per process. After a fork the child's copy of the parent's records is discarded."""
        pid = os.getpid()
        if pid != self._pid:
            self._pid = pid
            self._batch = None
            while self._recorder.drain(BATCH_RECORDS):
                pass
        self._worker.start(pid)

    def stop(self, timeout: float = 2.0) -> None:
        """Sends what is left and ends the thread, within `timeout` seconds; what cannot be sent by then is lost."""
        self._worker.signal()
        self._worker.join(os.getpid(), timeout)
        self._transport.abort()

    def step(self) -> float:
        """Sends at most one batch; returns the seconds to wait before the next step."""
        now = self._clock()
        if now < self._not_before:
            return min(self._not_before - now, DRAIN_SECONDS)
        batch = self._batch or self._make()
        if batch is None:
            return DRAIN_SECONDS
        self._batch = batch
        settled = self._deliver(batch)
        return 0.0 if settled and batch.records >= BATCH_RECORDS else DRAIN_SECONDS

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            stop.wait(self._guarded_step())
        for _ in range(64):  # the last records, without waiting for a service that does not answer
            if self._guarded_step() > 0.0:
                break
        self._transport.close()

    def _guarded_step(self) -> float:
        try:
            return self.step()
        except Exception as error:  # noqa: BLE001  the thread's outermost frame
            self._failsafe.record("exporter", error, own_thread=True)
            self._drop()
            return DRAIN_SECONDS

    def _make(self) -> _Batch | None:
        now = self._clock()
        records = self._recorder.drain(BATCH_RECORDS)
        counts = (self.dropped, self._failsafe.errors, self._live())
        if not records and (counts == self._told or now - self._told_at < NEWS_SECONDS):
            return None
        resource = {**self._resource, semconv.RECORDS_DROPPED: counts[0], semconv.HOOK_ERRORS: counts[1]}
        if counts[2] or self._told[2]:
            resource[semconv.HOOK_READS] = counts[2] or "{}"
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)  # 31: gzip framing
        parts = [packer.compress(head(resource).encode("ascii"))]
        comma, told = "", 0
        for count, texts in self._encode(records):
            parts.append(packer.compress((comma + ",".join(texts)).encode("ascii")))
            comma, told = ",", told + count
        if not told and (counts == self._told or now - self._told_at < NEWS_SECONDS):
            return None  # all of them wait: nothing to send, and the next look is not at once
        parts.append(packer.compress(TAIL.encode("ascii")))
        parts.append(packer.flush())
        return _Batch(b"".join(parts), told, counts, now)

    def _encode(self, records: list[Record]) -> Iterator[tuple[int, list[str]]]:
        """Records and their spans in pieces of about one slice, never empty, a record never torn."""
        slices = _Slices(self._clock, self._pause)
        ready: list[str] = []
        count = 0
        for record in records:
            own: list[str] = []
            try:
                for span in record.spans():
                    own.append(encode_span(span))
                    slices.did_one()
            except Exception as error:  # noqa: BLE001  costs this record only
                self._lost += 1
                self._failsafe.record("spans of a record", error, own_thread=True)
                continue
            ready += own
            count += bool(own)
            if len(ready) >= SLICE_SPANS:
                yield count, ready
                ready, count = [], 0
        if ready:
            yield count, ready

    def _deliver(self, batch: _Batch) -> bool:
        """Sends the batch in hand; False when it must be sent again."""
        try:
            reply = self._transport.send(
                "POST", "/v1/traces", headers=_HEADERS, body=batch.body, timeout=SEND_TIMEOUT, limit=REPLY_LIMIT
            )
        except OSError as error:
            self._complaints.say("unreachable", "kvguard: spans cannot be sent: %s", error)
            return self._later(batch, None)
        if 200 <= reply.status < 300:
            self._backoff.succeeded()
            self._batch = None
            self._told = batch.counts
            self._told_at = self._clock()
        elif reply.status in _REFUSED:
            self._complaints.say("refused", "kvguard: the service refused spans with status %d", reply.status)
            self._backoff.succeeded()
            self._drop()
        else:
            self._complaints.say(str(reply.status), "kvguard: spans: the service answered %s", described(reply.status))
            return self._later(batch, reply.retry_after)
        return True

    def _later(self, batch: _Batch, retry_after: float | None) -> bool:
        now = self._clock()
        self._not_before = now + self._backoff.failed(retry_after)
        self._transport.failover()
        if now - batch.made < RETRY_SECONDS:
            return False
        self._drop()
        return True

    def _drop(self) -> None:
        if self._batch is not None:
            self._lost += self._batch.records
            self._batch = None
