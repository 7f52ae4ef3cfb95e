"""The operators' switches, on disk: what is in force and who switched what, when and why.

SQLite in WAL mode with `synchronous=FULL`: when a call returns, the change survives kill -9 and loss of power. One
process per state directory (flock). Times are Unix seconds; they are passed in, this module knows no clock.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from guard.errors import LedgerError

FILE: Final = "ledger.sqlite3"
HISTORY_LIMIT: Final = 100_000
"""Switches kept; the oldest go first."""

Action = Literal["set", "clear", "expire"]

_MIGRATIONS: Final = (
    """
    CREATE TABLE overrides (
        scope TEXT PRIMARY KEY, mode TEXT NOT NULL, stores INTEGER NOT NULL, on_lease_expiry TEXT NOT NULL,
        expires_at REAL, reason TEXT NOT NULL, who TEXT NOT NULL, since REAL NOT NULL, revision INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE history (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, action TEXT NOT NULL, scope TEXT NOT NULL,
        mode TEXT NOT NULL, stores INTEGER NOT NULL, on_lease_expiry TEXT NOT NULL, expires_at REAL,
        reason TEXT NOT NULL, who TEXT NOT NULL
    ) STRICT;
    """,
)
"""Script number n takes a ledger of `user_version` n to n + 1. Append; never edit one that was released."""


class LedgerFullError(LedgerError):
    """The disk under the state directory is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One operator's switch for one scope. `revision` is the number of the history entry that made it."""

    scope: str
    mode: str
    stores: bool
    on_lease_expiry: str
    expires_at: float | None
    reason: str
    who: str
    since: float
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One entry of the history; for `clear` and `expire` the fields tell what was taken away."""

    id: int
    at: float
    action: str
    scope: str
    mode: str
    stores: bool
    on_lease_expiry: str
    expires_at: float | None
    reason: str
    who: str


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
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            self._check_version(version)
            for number in range(version, len(_MIGRATIONS)):
                db.executescript(f"BEGIN IMMEDIATE; {_MIGRATIONS[number]} PRAGMA user_version={number + 1}; COMMIT;")
            # A write that changes nothing: a read-only or full disk shows at start and not at the first switch.
            db.execute("BEGIN IMMEDIATE")
            db.execute(f"PRAGMA user_version={len(_MIGRATIONS)}")
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _check_version(self, version: int) -> None:
        if version > len(_MIGRATIONS):
            raise LedgerError(
                f"state directory {self.state_dir}: its ledger has version {version}, newer than this kvguard's "
                f"{len(_MIGRATIONS)}; start the newer kvguard or use another directory"
            )

    def overrides(self) -> list[Override]:
        """Every override on record, those that have run out included."""
        with self._errors():
            rows = self._db.execute(
                "SELECT scope, mode, stores, on_lease_expiry, expires_at, reason, who, since, revision FROM overrides"
            ).fetchall()
        return [Override(**_fields(row)) for row in rows]

    def set(self, override: Override) -> Override:
        """Puts `override` in force for its scope; returns it with its revision once it is durable.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        with self._transaction():
            revision = self._log(override, "set", override.since, override.reason, override.who)
            self._db.execute(
                "INSERT OR REPLACE INTO overrides VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*_columns(override), override.reason, override.who, override.since, revision),
            )
        return replace(override, revision=revision)

    def clear(self, override: Override, *, action: Action, at: float, reason: str, who: str) -> int:
        """Takes `override` away; returns the number of the history entry once it is durable.

        Raises:
            LedgerError: it could not be written; nothing has changed.
        """
        with self._transaction():
            revision = self._log(override, action, at, reason, who)
            self._db.execute("DELETE FROM overrides WHERE scope = ?", (override.scope,))
        return revision

    def history(self, *, limit: int = 100, before: int | None = None, scope: str | None = None) -> list[Switch]:
        """Switches, newest first: those with an id below `before`, of `scope` only where it is given."""
        with self._errors():
            rows = self._db.execute(
                "SELECT id, at, action, scope, mode, stores, on_lease_expiry, expires_at, reason, who FROM history"
                " WHERE (?1 IS NULL OR id < ?1) AND (?2 IS NULL OR scope = ?2) ORDER BY id DESC LIMIT ?3",
                (before, scope, limit),
            ).fetchall()
        return [Switch(**_fields(row)) for row in rows]

    def close(self) -> None:
        """Closes the file and frees the directory for another service."""
        self._db.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, override: Override, action: Action, at: float, reason: str, who: str) -> int:
        cursor = self._db.execute(
            "INSERT INTO history (at, action, scope, mode, stores, on_lease_expiry, expires_at, reason, who)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (at, action, *_columns(override), reason, who),
        )
        revision = int(cursor.lastrowid or 0)
        self._db.execute("DELETE FROM history WHERE id <= ?", (revision - HISTORY_LIMIT,))
        return revision

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


def _fields(row: sqlite3.Row) -> dict[str, Any]:
    return {**dict(row), "stores": bool(row["stores"])}


def _columns(override: Override) -> tuple[str, str, int, str, float | None]:
    return (override.scope, override.mode, int(override.stores), override.on_lease_expiry, override.expires_at)
