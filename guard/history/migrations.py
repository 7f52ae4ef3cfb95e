"""The ledger's tables, as steps from one version to the next."""

import sqlite3
from pathlib import Path
from typing import Final

from guard.errors import LedgerError

MIGRATIONS: Final = (
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
    # Every write with what was there before and after as JSON; ids stay, since ETags are made of them.
    """
    ALTER TABLE history RENAME TO history_1;
    CREATE TABLE history (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, action TEXT NOT NULL, scope TEXT NOT NULL,
        who TEXT NOT NULL, source TEXT NOT NULL, reason TEXT NOT NULL, before TEXT, after TEXT, evidence TEXT,
        own INTEGER NOT NULL, seq INTEGER NOT NULL
    ) STRICT;
    INSERT INTO history
        SELECT id, at, action, scope, who, '', reason, iif(action = 'set', NULL, told), iif(action = 'set', told, NULL),
            NULL, 0, id
        FROM (SELECT *, json_object('mode', mode, 'stores', json(iif(stores, 'true', 'false')),
            'on_lease_expiry', on_lease_expiry, 'expires_at', expires_at) AS told FROM history_1);
    DROP TABLE history_1;
    CREATE UNIQUE INDEX history_seq ON history (own, seq);
    CREATE TABLE answers (
        key TEXT NOT NULL, who TEXT NOT NULL, digest TEXT NOT NULL, revision INTEGER NOT NULL, PRIMARY KEY (who, key)
    ) STRICT;
    CREATE TABLE states (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    """,
)
"""Script number n takes a ledger of `user_version` n to n + 1. Append; never edit one that was released.

`own` tells what kvguard did by itself (1) from what people did (0): each is numbered and bounded by itself (`seq`).
"""


def migrate(db: sqlite3.Connection, state_dir: Path) -> None:
    """Takes the ledger of `state_dir` to the newest version, a transaction for each step.

    Raises:
        LedgerError: it was written by a newer kvguard.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"state directory {state_dir}: its ledger has version {version}, newer than this kvguard's "
            f"{len(MIGRATIONS)}; start the newer kvguard or use another directory"
        )
    for number in range(version, len(MIGRATIONS)):
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version={number + 1}; COMMIT;")
