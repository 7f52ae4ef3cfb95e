"""Changes of the operators' switches: durable in the ledger first, then in force, one at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import structlog

from guard.errors import LedgerError
from guard.history.ledger import Ledger, LedgerFullError, Override, Switch
from guard.service.directives import Clock
from guard.service.offload import Overrides
from guard.service.problems import Problem

OWN_NAME: Final = "kvguard"
"""Who the history names for what the service does by itself."""

RETRY_SECONDS: Final = 30.0

_T = TypeVar("_T")
log = structlog.get_logger("guard.service.switches")


class Switches:
    """Writes switches; `changed` is called when one is in force. Disk writes happen on a thread of their own."""

    def __init__(self, ledger: Ledger, overrides: Overrides, clock: Clock, changed: Callable[[], None]) -> None:
        self.overrides = overrides
        self.problem = ""  # of the last write; empty when it worked
        self._ledger = ledger
        self._clock = clock
        self._changed = changed
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "kvguard-ledger")
        self._expiring: dict[str, float] = {}  # scope -> monotonic time of the next try
        self._task: asyncio.Task[None] | None = None

    async def put(self, override: Override, *, if_match: str = "", if_none_match: str = "") -> Override:
        """Puts `override` in force; returns it with its revision, when it is durable.

        Raises:
            Problem: 412 when the scope is not as the caller believes, 507 or 503 when it cannot be written.
        """
        async with self._lock:
            self._check(self.overrides.get(override.scope, self._clock.wall()), if_match, if_none_match)
            written = await self._write(lambda: self._ledger.set(override))
            self.overrides.put(written)
        self._changed()
        log.info("switched", scope=written.scope, mode=written.mode, who=written.who, reason=written.reason)
        return written

    async def clear(self, scope: str, *, reason: str, who: str, if_match: str = "") -> Override:
        """Takes the override of `scope` away; returns what it was.

        Raises:
            Problem: 404 when there is none, 412 and 507 or 503 as for `put`.
        """
        async with self._lock:
            now = self._clock.wall()
            override = self.overrides.get(scope, now)
            if override is None:
                raise Problem(404, f"no switch is in force for {scope}")
            self._check(override, if_match, "")
            gone = override
            await self._write(lambda: self._ledger.clear(gone, action="clear", at=now, reason=reason, who=who))
            self.overrides.remove(scope)
        self._changed()
        log.info("cleared", scope=scope, mode=override.mode, who=who, reason=reason)
        return override

    async def history(self, limit: int, before: int | None, scope: str | None) -> list[Switch]:
        """Switches, newest first.

        Raises:
            Problem: 503 when the ledger cannot be read.
        """
        async with self._lock:
            return await self._write(lambda: self._ledger.history(limit=limit, before=before, scope=scope))

    def expire(self) -> None:
        """Sees to the overrides that have run out: they no longer count at once, then go from the ledger."""
        now = self._clock.monotonic()
        due = [
            item for item in self.overrides.expired(self._clock.wall()) if self._expiring.get(item.scope, now) <= now
        ]
        if not due or (self._task and not self._task.done()):
            return
        if any(item.scope not in self._expiring for item in due):
            self._changed()
        self._expiring.update({item.scope: now + RETRY_SECONDS for item in due})
        self._task = asyncio.create_task(self._remove(due))

    async def close(self) -> None:
        """Waits for the write that is under way and closes the ledger."""
        if self._task:
            await asyncio.wait([self._task])
        async with self._lock:
            await asyncio.to_thread(self._thread.shutdown)
            self._ledger.close()

    async def _remove(self, due: list[Override]) -> None:
        for override in due:
            at = override.expires_at or 0.0
            async with self._lock:
                current = self.overrides.expired(self._clock.wall())
                if override not in current:  # switched anew meanwhile
                    self._expiring.pop(override.scope, None)
                    continue
                try:
                    await self._write(
                        lambda gone=override, at=at: self._ledger.clear(  # type: ignore[misc]
                            gone, action="expire", at=at, reason="its time ran out", who=OWN_NAME
                        )
                    )
                except Problem:
                    continue
                self.overrides.remove(override.scope)
                self._expiring.pop(override.scope, None)
            log.info("expired", scope=override.scope, mode=override.mode)

    async def _write(self, call: Callable[[], _T]) -> _T:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except LedgerError as error:
            if str(error) != self.problem:
                log.warning("ledger_failed", problem=str(error))
            self.problem = str(error)
            status = 507 if isinstance(error, LedgerFullError) else 503
            raise Problem(status, str(error), kind="ledger", headers={"Retry-After": "30"}) from None
        self.problem = ""
        return result

    @staticmethod
    def _check(current: Override | None, if_match: str, if_none_match: str) -> None:
        tag = override_etag(current)
        if if_match and (current is None or not _names(if_match, tag)):
            there = f"it is now {tag}" if current else "there is none now"
            raise Problem(412, f"the switch changed meanwhile: {there}", headers={"ETag": tag})
        if if_none_match and current is not None and _names(if_none_match, tag):
            raise Problem(412, f"there is a switch already: {tag}", headers={"ETag": tag})


def override_etag(override: Override | None) -> str:
    """The entity tag of a scope: the number of the history entry that made its switch."""
    return f'"{override.revision if override else 0}"'


def _names(header: str, tag: str) -> bool:
    return header.strip() == "*" or tag in (item.strip() for item in header.split(","))
