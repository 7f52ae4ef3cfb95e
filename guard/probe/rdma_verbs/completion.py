"""Waiting for a completion without ever blocking inside pyverbs, which would hold the interpreter's lock."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

from .layout import Verbs

SPIN_SECONDS = 0.005
"""A poll spins so long; a read that takes longer is looked at every 0.5 ms, so that a dead wire burns no core."""
_EVENT_LINK = "anon_inode:[infinibandevent]"


class Completions:
    """A completion queue on a device context; `event` waits in select() on its channel, otherwise it is polled."""

    def __init__(self, verbs: Verbs, context: Any, *, event: bool) -> None:
        self._channel: Any = None
        self._fd = -1
        if event:
            before = _event_fds()
            self._channel = verbs.cq.CompChannel(context)
            fd = getattr(self._channel, "fd", None)  # rdma-core 44 does not give it
            self._fd = (_event_fds() - before).pop() if fd is None else int(fd)
        self.cq = verbs.cq.CQ(context, 16, None, self._channel, 0)
        if event:
            self.cq.req_notify()

    def wait(self, seconds: float) -> Any:
        """The next work completion, or None where none comes in time."""
        return self._select(seconds) if self._channel is not None else self._poll(seconds)

    def _poll(self, seconds: float) -> Any:
        poll, clock = self.cq.poll, time.perf_counter
        start = clock()
        while True:
            count, completions = poll(1)
            if count:
                return completions[0]
            waited = clock() - start
            if waited > seconds:
                return None
            if waited > SPIN_SECONDS:
                time.sleep(0.0005)

    def _select(self, seconds: float) -> Any:
        if select.select([self._fd], [], [], seconds)[0]:
            self._channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
            self.cq.req_notify()
        count, completions = self.cq.poll(1)
        return completions[0] if count else None

    def close(self) -> None:
        """Frees the queue, then its channel; the queue pair must be gone."""
        self.cq.close()
        if self._channel is not None:
            self._channel.close()


def _event_fds() -> set[int]:
    """This process's event descriptors of verbs, by what they link to (numbers are reused)."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()) == _EVENT_LINK:
                found.add(int(path.name))
        except OSError:
            continue
    return found
