"""What the ledger holds and hands out: switches, entries of the history, and where a write came from."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

OWN_NAME: Final = "kvguard"
"""Who the history names for what the service does by itself."""

Action = Literal["set", "clear", "expire"]


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
class Entry:
    """One entry of the history. `action` is `set`, `clear` or `expire` of a switch, `objective`, or an event's kind.

    `source` is where the call came from, `before` and `after` what was and is in force (None: nothing), `evidence`
    what the controller knew.
    """

    id: int
    at: float
    action: str
    scope: str
    who: str
    source: str
    reason: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    evidence: dict[str, Any] | None


class Call(NamedTuple):
    """Where a write came from; with an idempotency `key`, `digest` tells whether it is the same request again."""

    source: str = ""
    key: str = ""
    digest: str = ""


class Answer(NamedTuple):
    """What an idempotency key was used for."""

    digest: str
    entry: Entry
