"""What kvguard did by itself reaches the ledger, in order, also when the disk refuses for a while."""

from pathlib import Path
from typing import Any

import pytest

from guard.errors import LedgerError
from guard.history.ledger import Ledger
from guard.service import journal as module
from guard.service.journal import RETRY_SECONDS, Journal
from guard.wire import Event

pytestmark = pytest.mark.anyio


def event(number: int) -> Event:
    return Event(at=float(number), kind="controller", scope="fleet", message=f"step {number}", evidence={"n": number})


class Refusing(Ledger):
    """A ledger that can be told to refuse."""

    refuses = False

    def note(self, *arguments: Any) -> None:
        if self.refuses:
            raise LedgerError("state directory x: disk I/O error")
        super().note(*arguments)


async def settled(journal: Journal) -> None:
    assert journal._task
    await journal._task


async def test_state_survives_a_restart_and_an_equal_one_is_not_written_again(tmp_path: Path) -> None:
    journal = Journal(Ledger(tmp_path), lambda: 0.0)
    assert journal.state("controller") is None
    journal.put_state("controller", {"e/0": "bypass"})
    journal.flush()
    await settled(journal)
    done = journal._task
    journal.put_state("controller", {"e/0": "bypass"})
    journal.flush()
    assert journal._task is done
    journal.put_state("last", 1.5)  # written when it closes
    await journal.close()
    journal = Journal(Ledger(tmp_path), lambda: 0.0)
    assert (journal.state("controller"), journal.state("last")) == ({"e/0": "bypass"}, 1.5)
    journal.put_state("last", None)
    await journal.close()
    journal = Journal(Ledger(tmp_path), lambda: 0.0)
    assert journal.state("last") is None
    await journal.close()


async def test_what_the_disk_refused_is_written_later_in_order_and_the_oldest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    now = [0.0]
    ledger = Refusing(tmp_path)
    journal = Journal(ledger, lambda: now[0])
    ledger.refuses = True
    journal.note(event(0))
    journal.note(event(1))
    journal.put_state("k", 1)
    journal.flush()
    await settled(journal)
    assert journal.problem == "state directory x: disk I/O error"
    ledger.refuses = False
    failed = journal._task
    journal.flush()  # too soon
    assert journal._task is failed
    for number in (2, 3, 4):
        journal.note(event(number))
    now[0] += RETRY_SECONDS
    journal.flush()
    await settled(journal)
    assert journal.problem == ""
    assert [item.reason for item in ledger.history()] == ["step 4", "step 3", "step 2", "step 1"]
    assert ledger.states() == {"k": "1"}
    await journal.close()
