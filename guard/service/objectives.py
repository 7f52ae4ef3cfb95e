"""The objectives in force: those of the settings, until an operator puts others, which the ledger keeps."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from guard.service.journal import Journal
from guard.service.problems import Problem
from guard.service.switches import names
from guard.slo.objective import ObjectiveError, Objectives, parse

KEY: Final = "objectives"
"""Key of the ledger under which they are kept."""

log = structlog.get_logger("guard.service.objectives")


class Promises:
    """The objectives, where they came from, and how to change them."""

    def __init__(self, configured: Sequence[Mapping[str, Any]], journal: Journal) -> None:
        self._configured = parse(configured)
        self._journal = journal
        self._lock = asyncio.Lock()
        self.in_force, self.source = self._configured, "settings"
        kept = journal.state(KEY)
        if kept is not None:
            try:
                self.in_force, self.source = parse(kept), "operator"
            except ObjectiveError as error:  # written by another version
                log.warning("objectives_unreadable", problem=str(error))

    @property
    def etag(self) -> str:
        """The entity tag of what is in force: the same for the same objectives from the same source."""
        content = json.dumps([self.source, [item.to_json() for item in self.in_force.items]], sort_keys=True)
        return f'"{hashlib.sha256(content.encode()).hexdigest()[:16]}"'

    async def put(
        self, items: Objectives, *, at: float, who: str, source: str, reason: str, if_match: str = ""
    ) -> None:
        """Puts objectives in force, when they are durable.

        Raises:
            Problem: 412 when those in force are not what `if_match` names, 507 or 503 when the ledger cannot be
                written; nothing has changed.
        """
        told = [item.to_json() for item in items.items]
        async with self._lock:
            self._check(if_match)
            await self._write(json.dumps(told), {"objectives": told}, at, who, source, reason)
            self.in_force, self.source = items, "operator"

    async def clear(self, *, at: float, who: str, source: str, reason: str, if_match: str = "") -> None:
        """Goes back to those of the settings.

        Raises:
            Problem: as for `put`.
        """
        told = [item.to_json() for item in self._configured.items]
        async with self._lock:
            self._check(if_match)
            await self._write("", {"objectives": told}, at, who, source, reason)
            self.in_force, self.source = self._configured, "settings"

    def _check(self, if_match: str) -> None:
        if if_match and not names(if_match, self.etag):
            raise Problem(
                412, f"the objectives changed meanwhile: they are now {self.etag}", headers={"ETag": self.etag}
            )

    async def _write(self, state: str, after: dict[str, Any], at: float, who: str, source: str, reason: str) -> None:
        before = {"objectives": [item.to_json() for item in self.in_force.items]}
        await self._journal.do(
            lambda ledger: ledger.audit(
                at=at, action="objective", scope="fleet", who=who, source=source, reason=reason,
                before=before, after=after, states={KEY: state},
            )
        )  # fmt: skip
