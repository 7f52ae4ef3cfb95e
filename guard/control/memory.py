"""The controller's memory as JSON, so that a restart goes on where it was: no jump, no second learning."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from guard.control.pool import Pool
from guard.control.shapes import STATES, Coefficients, Read, State

_PLAIN: Final = (
    "name", "reason", "pace", "goods", "backoff", "lost", "share", "limit", "baseline", "rtt",
)  # fmt: skip
_TIMES: Final = ("since", "against_since", "raised", "fresh")
_READ: Final = tuple(each.name for each in fields(Read))
_SENT: Final = tuple(each.name for each in fields(Coefficients))


def to_json(state: State, now: float) -> dict[str, Any]:
    """The state as plain values; times become ages, since another process has another clock."""
    sent = state.sent
    return {
        **{key: getattr(state, key) for key in _PLAIN},
        **{key: _age(getattr(state, key), now) for key in _TIMES},
        "failures": [now - at for at in state.failures],
        "reads": [{**{key: getattr(read, key) for key in _READ}, "at": now - read.at} for read in state.reads],
        "sent": None if sent is None else {key: getattr(sent, key) for key in _SENT},
    }


def from_json(data: object, now: float, down: float = 0.0) -> State:
    """The state that was kept; `down` is how long nobody ran. What cannot be read is a new state, never an error."""
    if not isinstance(data, Mapping) or data.get("name") not in STATES:
        return State()
    try:
        sent = data.get("sent")
        return State(
            **{key: data[key] for key in _PLAIN},
            since=_time(data["since"], now - down),
            raised=_time(data["raised"], now - down),
            fresh=_time(data.get("fresh"), now - down),
            against_since=None if data["against_since"] is None else now - down - float(data["against_since"]),
            failures=tuple(now - down - float(age) for age in data["failures"]),
            reads=tuple(Read(**{**read, "at": now - down - float(read["at"])}) for read in data["reads"]),
            sent=None if sent is None else Coefficients(**{key: sent[key] for key in _SENT}),
        )
    except (KeyError, TypeError, ValueError):
        return State()


def pool_to_json(pool: Pool, now: float) -> dict[str, Any]:
    """A pool as plain values, as `to_json`."""
    return {"limit": pool.limit, "baseline": pool.baseline, "paid": pool.paid, "read_at": _age(pool.read_at, now)}


def pool_from_json(data: object, now: float) -> Pool:
    """The pool that was kept, as `from_json`: while nobody ran nobody could tell of reads, so that is no idle time."""
    if not isinstance(data, Mapping):
        return Pool()
    try:
        limit, baseline, paid, read_at = (data[key] for key in ("limit", "baseline", "paid", "read_at"))
        return Pool(
            limit=None if limit is None else float(limit), baseline=None if baseline is None else float(baseline),
            paid=float(paid), read_at=None if read_at is None else now - float(read_at),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return Pool()


def _age(at: float | None, now: float) -> float | None:
    return None if at is None or not math.isfinite(at) else now - at


def _time(age: float | None, now: float) -> float:
    return -math.inf if age is None else now - float(age)
