"""The ledger: durable, one owner, clear about what is wrong."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from guard.errors import LedgerError
from guard.history import ledger as module
from guard.history.ledger import FILE, Ledger, LedgerFullError, Override

OFF = Override(
    scope="fleet",
    mode="off",
    stores=False,
    on_lease_expiry="keep",
    expires_at=1060.0,
    reason="link is down",
    who="ann",
    since=1000.0,
)


def test_what_was_set_is_read_back_after_a_restart(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        written = ledger.set(OFF)
        assert written == replace(OFF, revision=1)
    with Ledger(tmp_path) as ledger:
        assert ledger.overrides() == [written]


def test_a_second_set_replaces_the_first_and_both_are_history(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.set(OFF)
        ledger.set(replace(OFF, mode="on", since=1001.0, who="bob"))
        assert [(item.mode, item.who) for item in ledger.overrides()] == [("on", "bob")]
        assert [(item.id, item.at, item.action, item.mode, item.who) for item in ledger.history()] == [
            (2, 1001.0, "set", "on", "bob"),
            (1, 1000.0, "set", "off", "ann"),
        ]


def test_clear_leaves_history_that_tells_what_was_taken_away(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        written = ledger.set(OFF)
        assert ledger.clear(written, action="expire", at=1060.5, reason="ttl", who="kvguard") == 2
        assert ledger.overrides() == []
        last = ledger.history(limit=1)[0]
        assert (last.action, last.at, last.scope, last.mode, last.stores) == ("expire", 1060.5, "fleet", "off", False)


def test_history_pages_and_filters(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        for number in range(6):
            ledger.set(replace(OFF, scope="fleet" if number % 2 else "backend:a/b", since=float(number)))
        assert [item.id for item in ledger.history(limit=2)] == [6, 5]
        assert [item.id for item in ledger.history(limit=2, before=5)] == [4, 3]
        assert [item.id for item in ledger.history(scope="backend:a/b")] == [5, 3, 1]


def test_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORY_LIMIT", 10)
    with Ledger(tmp_path) as ledger:
        for number in range(25):
            ledger.set(replace(OFF, since=float(number)))
        assert [item.id for item in ledger.history()] == list(range(25, 15, -1))


def test_survives_kill_9_right_after_the_call_returned(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from guard.history.ledger import Ledger, Override
        ledger = Ledger(Path({str(tmp_path)!r}))
        for n in range(5):
            ledger.set(Override(scope=f"engine:h:8000/{{n}}", mode="off", stores=True, on_lease_expiry="keep",
                                expires_at=None, reason="r", who="w", since=float(n)))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    with Ledger(tmp_path) as ledger:
        assert sorted(item.scope for item in ledger.overrides()) == [f"engine:h:8000/{n}" for n in range(5)]


def test_a_second_service_on_the_directory_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(LedgerError, match=r"in use by another kvguard") as caught:
        Ledger(tmp_path)
    assert str(tmp_path) in str(caught.value)
    Ledger(tmp_path).close()  # free again


def test_a_directory_that_cannot_be_made_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LedgerError, match=r"state directory .*file/state: Not a directory"):
        Ledger(tmp_path / "file" / "state")


def test_read_only_file_is_found_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(tmp_path).close()
    real = sqlite3.connect

    def read_only(file: Path, **options: object) -> sqlite3.Connection:
        return real(f"file:{file}?mode=ro", uri=True, isolation_level=None)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(LedgerError, match=r"readonly"):
        Ledger(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_directory_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LedgerError, match=r"Permission denied"):
        Ledger(tmp_path)


def test_a_full_disk_fails_the_call_and_changes_nothing(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        kept = ledger.set(OFF)
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(LedgerFullError, match=r"state directory .* full"):
            ledger.set(replace(OFF, mode="on", reason="x" * 20_000))
        assert ledger.overrides() == [kept]
        ledger._db.execute("PRAGMA max_page_count=10000")
        assert ledger.set(replace(OFF, mode="on", reason="x" * 20_000)).revision == 2


def test_a_newer_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(LedgerError, match=r"version 99, newer"):
        Ledger(tmp_path)


def test_garbage_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is not a database" * 100)
    with pytest.raises(LedgerError, match=r"not a database"):
        Ledger(tmp_path)
