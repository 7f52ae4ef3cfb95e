"""Changes of the operators' switches: durable in the ledger first, then in force, one at a time."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from guard import semconv
from guard.history.shapes import OWN_NAME, Call, Entry, Override
from guard.service.directives import Clock
from guard.service.journal import Journal
from guard.service.offload import Overrides
from guard.service.problems import Problem
from guard.wire import Event

RETRY_SECONDS: Final = 30.0

log = structlog.get_logger("guard.service.switches")


class Switches:
    """Writes switches. `changed` is called when one is in force, `tell` with what is worth telling."""

    def __init__(
        self,
        journal: Journal,
        overrides: Overrides,
        clock: Clock,
        changed: Callable[[], None],
        tell: Callable[[Event], object] = lambda _: None,
    ) -> None:
        self.overrides = overrides
        self._journal = journal
        self._clock = clock
        self._changed = changed
        self._tell = tell
        self._lock = asyncio.Lock()
        self._expiring: dict[str, float] = {}  # scope -> monotonic time of the next try
        self._task: asyncio.Task[None] | None = None

    async def put(
        self, override: Override, call: Call, *, if_match: str = "", if_none_match: str = ""
    ) -> tuple[Override | None, bool]:
        """Puts `override` in force; returns it with its revision when it is durable, and whether this is a replay.

        Raises:
            Problem: 412 when the scope is not as the caller believes, 422 when the idempotency key was used for
                something else, 507 or 503 when it cannot be written.
        """
        async with self._lock:
            if replayed := await self._replayed(override.scope, override.who, call):
                return _of(replayed), True
            self._check(self.overrides.get(override.scope, self._clock.wall()), if_match, if_none_match)
            written = await self._journal.do(lambda ledger: ledger.set(override, call))
            self.overrides.put(written)
        self._changed()
        log.info(
            "switched", scope=written.scope, mode=written.mode, who=written.who, source=call.source,
            reason=written.reason,
        )  # fmt: skip
        self._told(written, f"{written.mode} by {written.who}", written.since, written.reason)
        return written, False

    async def clear(self, scope: str, call: Call, *, reason: str, who: str, if_match: str = "") -> bool:
        """Takes the override of `scope` away; returns whether this is a replay.

        Raises:
            Problem: 404 when there is none, else as for `put`.
        """
        async with self._lock:
            if await self._replayed(scope, who, call):
                return True
            now = self._clock.wall()
            gone = self.overrides.get(scope, now)
            if gone is None:
                raise Problem(404, f"no switch is in force for {scope}")
            self._check(gone, if_match, "")
            await self._journal.do(
                lambda ledger: ledger.clear(gone, action="clear", at=now, reason=reason, who=who, call=call)
            )
            self.overrides.remove(scope)
        self._changed()
        log.info("cleared", scope=scope, mode=gone.mode, who=who, source=call.source, reason=reason)
        self._told(gone, f"{gone.mode} cleared by {who}", now, reason)
        return False

    async def history(self, limit: int, before: int | None, scope: str | None) -> list[Entry]:
        """What was done, newest first.

        Raises:
            Problem: 503 when the ledger cannot be read.
        """
        return await self._journal.do(lambda ledger: ledger.history(limit=limit, before=before, scope=scope))

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
        """Waits for the write that is under way."""
        if self._task:
            await asyncio.wait([self._task])
        async with self._lock:
            pass

    async def _remove(self, due: list[Override]) -> None:
        for override in due:
            at = override.expires_at or 0.0
            async with self._lock:
                current = self.overrides.expired(self._clock.wall())
                if override not in current:  # switched anew meanwhile
                    self._expiring.pop(override.scope, None)
                    continue
                try:
                    await self._journal.do(
                        lambda ledger, gone=override, at=at: ledger.clear(  # type: ignore[misc]
                            gone, action="expire", at=at, reason="its time ran out", who=OWN_NAME
                        )
                    )
                except Problem:
                    continue
                self.overrides.remove(override.scope)
                self._expiring.pop(override.scope, None)
            log.info("expired", scope=override.scope, mode=override.mode)
            self._told(override, f"{override.mode} ran out", at, "")

    async def _replayed(self, scope: str, who: str, call: Call) -> Entry | None:
        """The entry that this very request made when it came before."""
        if not call.key:
            return None
        answer = await self._journal.do(lambda ledger: ledger.answer(who, call.key))
        if answer and (answer.digest != call.digest or answer.entry.scope != scope):
            raise Problem(422, "this Idempotency-Key was used for another request", kind="idempotency-key-reused")
        return answer.entry if answer else None

    def _told(self, override: Override, what: str, at: float, reason: str) -> None:
        message = f"{override.scope}: {what}" + (f": {reason}" if reason else "")
        evidence = {"mode": override.mode, "stores": override.stores, "expires_at": override.expires_at}
        self._tell(Event(at=at, kind=semconv.EVENT_SWITCH, scope=override.scope, message=message, evidence=evidence))

    @staticmethod
    def _check(current: Override | None, if_match: str, if_none_match: str) -> None:
        tag = override_etag(current)
        if if_match and (current is None or not names(if_match, tag)):
            there = f"it is now {tag}" if current else "there is none now"
            raise Problem(412, f"the switch changed meanwhile: {there}", headers={"ETag": tag})
        if if_none_match and current is not None and names(if_none_match, tag):
            raise Problem(412, f"there is a switch already: {tag}", headers={"ETag": tag})


def override_etag(override: Override | None) -> str:
    """The entity tag of a scope: the number of the history entry that made its switch."""
    return f'"{override.revision if override else 0}"'


def names(header: str, tag: str) -> bool:
    """Whether an If-Match or If-None-Match `header` names the entity tag `tag`."""
    return header.strip() == "*" or tag in (item.strip() for item in header.split(","))


def _of(entry: Entry) -> Override | None:
    """The override that an entry of the history put in force."""
    if entry.after is None:
        return None
    return Override(
        scope=entry.scope, reason=entry.reason, who=entry.who, since=entry.at, revision=entry.id, **entry.after
    )
