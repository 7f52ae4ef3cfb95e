"""What must outlive the service, on disk: the switches in force, who did what and why, the controller's state.

SQLite in WAL mode with `synchronous=FULL`: when a call returns, the change survives kill -9 and loss of power. One
process per state directory (flock). Times are Unix seconds; they are passed in, this module knows no clock.
"""

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from guard.errors import LedgerError
from guard.history.migrations import MIGRATIONS, migrate
from guard.history.shapes import OWN_NAME, Action, Answer, Call, Entry, Override
from guard.wire import Event

FILE: Final = "ledger.sqlite3"
HISTORY_LIMIT: Final = 100_000
"""Entries kept of what people did, and as many of what kvguard did by itself; the oldest go first."""

ANSWER_LIMIT: Final = 10_000
"""Idempotency keys remembered; fewer than entries, so that the entry of a remembered key is still there."""

_OVERRIDE: Final = "scope, mode, stores, on_lease_expiry, expires_at, reason, who, since, revision"
_TOLD: Final = ("mode", "stores", "on_lease_expiry", "expires_at")


class LedgerFullError(LedgerError):
    """The disk under the state directory is full."""


class Ledger:
    """The open ledger. Not thread-safe: one thread at a time; calls block for a disk write."""

    def __init__(self, state_dir: Path) -> None:
        """Opens or makes the ledger in `state_dir`.

        Raises:
            LedgerError: the directory cannot be written, is in use by another service, or holds a newer ledger.
        """
        self.state_dir = state_dir
        with self._errors():
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._take_lock()
                self._db = self._connect(state_dir / FILE)
            except BaseException:
                os.close(self._lock)
                raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(f"state directory {self.state_dir}: in use by another kvguard service") from None

    def _connect(self, file: Path) -> sqlite3.Connection:
        db = sqlite3.connect(file, timeout=5.0, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            migrate(db, self.state_dir)
            # A write that changes nothing: a read-only or full disk shows at start and not at the first switch.
            db.execute("BEGIN IMMEDIATE")
            db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def overrides(self) -> list[Override]:
        """Every override on record, those that have run out included."""
        with self._errors():
            rows = self._db.execute(f"SELECT {_OVERRIDE} FROM overrides").fetchall()  # noqa: S608  a constant
        return [_override(row) for row in rows]

    def set(self, override: Override, call: Call = Call()) -> Override:  # noqa: B008  frozen
        """Puts `override` in force for its scope; returns it with its revision once it is durable.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        at = override.since
        with self._transaction():
            row = self._db.execute(
                f"SELECT {_OVERRIDE} FROM overrides WHERE scope = ? AND (expires_at IS NULL OR expires_at > ?)",  # noqa: S608
                (override.scope, at),
            ).fetchone()
            before = _told(_override(row)) if row else None
            revision = self._log(
                at, "set", override.scope, override.who, call.source, override.reason, before, _told(override)
            )
            self._db.execute(
                "INSERT OR REPLACE INTO overrides VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (override.scope, override.mode, int(override.stores), override.on_lease_expiry, override.expires_at,
                 override.reason, override.who, at, revision),
            )  # fmt: skip
            self._remember(override.who, call, revision)
        return replace(override, revision=revision)

    def clear(
        self,
        override: Override,
        *,
        action: Action,
        at: float,
        reason: str,
        who: str,
        call: Call = Call(),  # noqa: B008
    ) -> int:
        """Takes `override` away; returns the number of the history entry once it is durable.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        with self._transaction():
            revision = self._log(at, action, override.scope, who, call.source, reason, _told(override), None)
            self._db.execute("DELETE FROM overrides WHERE scope = ?", (override.scope,))
            self._remember(who, call, revision)
        return revision

    def audit(
        self,
        *,
        at: float,
        action: str,
        scope: str,
        who: str,
        source: str,
        reason: str = "",
        before: Mapping[str, Any] | None,
        after: Mapping[str, Any] | None,
        states: Mapping[str, str] | None = None,
    ) -> int:
        """Notes what somebody changed besides switches, and in the same transaction the `states` that are the change.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        with self._transaction():
            revision = self._log(at, action, scope, who, source, reason, before, after)
            self._put(states or {})
        return revision

    def note(self, events: Sequence[Event], states: Mapping[str, str]) -> None:
        """Adds what kvguard did by itself, with its evidence, and replaces `states`: all of it or nothing.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        with self._transaction():
            for item in events:
                evidence = dict(item.evidence)
                self._log(item.at, item.kind, item.scope, OWN_NAME, "", item.message, None, None, evidence, own=1)
            self._put(states)

    def put_state(self, key: str, value: str) -> None:
        """Keeps a text, JSON as a rule, under a key; an empty one takes the key away.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        self.note((), {key: value})

    def states(self) -> dict[str, str]:
        """Every text that was put, by key."""
        with self._errors():
            return dict(self._db.execute("SELECT key, value FROM states").fetchall())

    def answer(self, who: str, key: str) -> Answer | None:
        """What `who` used the idempotency key for; None: not used yet."""
        with self._errors():
            row = self._db.execute(
                "SELECT digest, history.* FROM answers JOIN history ON history.id = revision"
                " WHERE answers.who = ? AND key = ?",
                (who, key),
            ).fetchone()
        return Answer(row["digest"], _entry(row)) if row else None

    def history(self, *, limit: int = 100, before: int | None = None, scope: str | None = None) -> list[Entry]:
        """The history, newest first: entries with an id below `before`, of `scope` only where it is given."""
        with self._errors():
            rows = self._db.execute(
                "SELECT * FROM history WHERE (?1 IS NULL OR id < ?1) AND (?2 IS NULL OR scope = ?2)"
                " ORDER BY id DESC LIMIT ?3",
                (before, scope, limit),
            ).fetchall()
        return [_entry(row) for row in rows]

    def close(self) -> None:
        """Closes the file and frees the directory for another service."""
        self._db.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(
        self,
        at: float,
        action: str,
        scope: str,
        who: str,
        source: str,
        reason: str,
        before: Mapping[str, Any] | None,
        after: Mapping[str, Any] | None,
        evidence: Mapping[str, Any] | None = None,
        *,
        own: int = 0,
    ) -> int:
        row = self._db.execute("SELECT coalesce(max(seq), 0) + 1 FROM history WHERE own = ?", (own,)).fetchone()
        seq = int(row[0])
        cursor = self._db.execute(
            "INSERT INTO history (at, action, scope, who, source, reason, before, after, evidence, own, seq)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (at, action, scope, who, source, reason, _json(before), _json(after), _json(evidence), own, seq),
        )
        self._db.execute("DELETE FROM history WHERE own = ? AND seq <= ?", (own, seq - HISTORY_LIMIT))
        return int(cursor.lastrowid or 0)

    def _remember(self, who: str, call: Call, revision: int) -> None:
        if call.key:
            self._db.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (call.key, who, call.digest, revision))
            self._db.execute("DELETE FROM answers WHERE rowid <= last_insert_rowid() - ?", (ANSWER_LIMIT,))

    def _put(self, states: Mapping[str, str]) -> None:
        self._db.executemany("DELETE FROM states WHERE key = ?", [(key,) for key in states])
        self._db.executemany("INSERT INTO states VALUES (?, ?)", [item for item in states.items() if item[1]])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            kind = LedgerFullError if code == sqlite3.SQLITE_FULL else LedgerError
            raise kind(f"state directory {self.state_dir}: {error}") from error
        except OSError as error:
            raise LedgerError(f"state directory {self.state_dir}: {error.strerror or error}") from error


def _override(row: sqlite3.Row) -> Override:
    return Override(**{**dict(row), "stores": bool(row["stores"])})


def _entry(row: sqlite3.Row) -> Entry:
    fields = {name: row[name] for name in Entry.__slots__}
    for name in ("before", "after", "evidence"):
        fields[name] = json.loads(fields[name]) if fields[name] else None
    return Entry(**fields)


def _told(override: Override) -> dict[str, Any]:
    return {name: getattr(override, name) for name in _TOLD}


def _json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, default=str)
