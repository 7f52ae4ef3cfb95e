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
from guard.history.ledger import FILE, Ledger, LedgerFullError
from guard.history.migrations import MIGRATIONS
from guard.history.shapes import Call, Override
from guard.wire import Event

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
        assert [(item.id, item.at, item.action, (item.after or {})["mode"], item.who) for item in ledger.history()] == [
            (2, 1001.0, "set", "on", "bob"),
            (1, 1000.0, "set", "off", "ann"),
        ]


def test_clear_leaves_history_that_tells_what_was_taken_away(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        written = ledger.set(OFF)
        assert ledger.clear(written, action="expire", at=1060.5, reason="ttl", who="kvguard") == 2
        assert ledger.overrides() == []
        last = ledger.history(limit=1)[0]
        assert (last.action, last.at, last.scope, last.after) == ("expire", 1060.5, "fleet", None)
        assert last.before == {"mode": "off", "stores": False, "on_lease_expiry": "keep", "expires_at": 1060.0}


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
        from guard.history.ledger import Ledger
        from guard.history.shapes import Override
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


def test_history_tells_what_was_before_and_from_where(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.set(OFF, Call(source="10.0.0.9"))
        ledger.set(replace(OFF, mode="on", since=1001.0, expires_at=None))
        ledger.set(replace(OFF, mode="auto", since=1002.0, expires_at=1003.0))
        ledger.set(replace(OFF, mode="on", since=1004.0))  # what was before has run out
        last, third, second, first = ledger.history()
    assert (first.source, first.before, (first.after or {})["expires_at"]) == ("10.0.0.9", None, 1060.0)
    assert (second.source, (second.before or {})["mode"], (second.after or {})["mode"]) == ("", "off", "on")
    assert (third.before or {})["mode"] == "on"
    assert last.before is None


def test_what_kvguard_did_has_its_evidence_and_does_not_push_out_what_people_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HISTORY_LIMIT", 3)
    event = Event(at=5.0, kind="controller", scope="engine:e/0", message="open -> bypass", evidence={"rtt": 0.004})
    with Ledger(tmp_path) as ledger:
        ledger.set(OFF)
        for number in range(10):
            ledger.note([replace(event, at=float(number))], {})
        entries = ledger.history()
        assert [(item.id, item.action) for item in entries] == [(11, "controller"), (10, "controller"),
            (9, "controller"), (1, "set")]  # fmt: skip
        assert (entries[0].who, entries[0].reason, entries[0].evidence) == ("kvguard", "open -> bypass", {"rtt": 0.004})


def test_states_are_kept_replaced_and_taken_away(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.put_state("controller", '{"a": 1}')
        ledger.note((), {"controller": '{"a": 2}', "objectives": "[]"})
    with Ledger(tmp_path) as ledger:
        assert ledger.states() == {"controller": '{"a": 2}', "objectives": "[]"}
        ledger.put_state("objectives", "")
        assert ledger.states() == {"controller": '{"a": 2}'}


def test_audit_and_its_states_are_one_transaction(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        number = ledger.audit(
            at=1.0, action="objective", scope="model:m", who="ann", source="10.0.0.9", reason="tighter",
            before={"ttft": 2.0}, after={"ttft": 1.0}, states={"objectives": "x"},
        )  # fmt: skip
        (entry,) = ledger.history()
        assert (entry.id, entry.action, entry.before, entry.after) == (
            number,
            "objective",
            {"ttft": 2.0},
            {"ttft": 1.0},
        )
        assert ledger.states() == {"objectives": "x"}
        ledger._db.execute("DROP TABLE states")
        with pytest.raises(LedgerError, match="no such table"):
            ledger.audit(at=2.0, action="objective", scope="model:m", who="ann", source="", before=None, after=None,
                         states={"k": "v"})  # fmt: skip
        assert len(ledger.history()) == 1


def test_an_idempotency_key_finds_its_entry_after_a_restart_and_belongs_to_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_LIMIT", 2)
    with Ledger(tmp_path) as ledger:
        ledger.set(OFF, Call(key="k1", digest="d1"))
    with Ledger(tmp_path) as ledger:
        found = ledger.answer("ann", "k1")
        assert found
        assert (found.digest, found.entry.id, found.entry.action) == ("d1", 1, "set")
        assert ledger.answer("bob", "k1") is None
        written = ledger.set(OFF, Call(key="k2", digest="d2"))
        ledger.clear(written, action="clear", at=1.0, reason="", who="ann", call=Call(key="k3", digest="d3"))
        assert ledger.answer("ann", "k1") is None  # the oldest made room
        assert (ledger.answer("ann", "k3") or found).entry.action == "clear"


def test_a_ledger_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    db.executescript(MIGRATIONS[0] + "PRAGMA user_version=1;")
    db.execute("INSERT INTO overrides VALUES ('fleet', 'off', 0, 'keep', 1060.0, 'link', 'ann', 1000.0, 7)")
    old = "INSERT INTO history VALUES (?, ?, ?, 'fleet', ?, ?, 'keep', ?, 'link', 'ann')"
    db.execute(old, (6, 999.0, "clear", "on", 1, None))
    db.execute(old, (7, 1000.0, "set", "off", 0, 1060.0))
    db.close()
    with Ledger(tmp_path) as ledger:
        assert [(item.scope, item.mode, item.revision) for item in ledger.overrides()] == [("fleet", "off", 7)]
        new, gone = ledger.history()
        assert (new.id, new.before) == (7, None)
        assert new.after == {"mode": "off", "stores": False, "on_lease_expiry": "keep", "expires_at": 1060.0}
        assert (gone.id, gone.after, (gone.before or {})["stores"]) == (6, None, True)
        assert ledger.set(OFF).revision == 8
