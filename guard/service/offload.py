"""Which switch holds for which engine and backend (pure: times are passed in).

The narrowest scope wins: `engine:ID`, then `backend:NAME`, `model:NAME`, `fleet`. Without any, the default mode holds.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from guard import semconv
from guard.control.shapes import Coefficients, Plan
from guard.history.shapes import Override
from guard.wire import Directive, Reads

SCOPE_KINDS: Final = ("model", "backend", "engine")
NAME_LIMIT: Final = 256
"""Longest engine id, model name or backend name, in characters."""

STATE_OPEN: Final = "open"
STATE_BYPASS: Final = "bypass"


def parse_scope(text: str) -> str:
    """`text` when it is a scope: `fleet`, `model:NAME`, `backend:NAME` or `engine:ID`; names may hold slashes.

    Raises:
        ValueError: it is not; says what is.
    """
    kind, _, name = text.partition(":")
    if text == "fleet" or (kind in SCOPE_KINDS and is_name(name)):
        return text
    raise ValueError(f"{text[:80]!r} is not a scope: fleet, model:NAME, backend:NAME or engine:ID")


def is_name(text: str) -> bool:
    """Whether `text` can be the name of an engine, a model or a backend."""
    return 0 < len(text) <= NAME_LIMIT and text.isprintable()


def matches(scope: str, engine_id: str, model: str, backends: Iterable[str]) -> bool:
    """Whether `scope` covers this engine, or one of its backends."""
    kind, _, name = scope.partition(":")
    if kind == "engine":
        return name == engine_id
    if kind == "backend":
        return name in backends
    return name == model if kind == "model" else kind == "fleet"


class Overrides:
    """The switches in force, by scope. Those that have run out stay until `remove`, but no longer count.

    `default_mode` holds where there is none.
    """

    def __init__(self, overrides: Iterable[Override] = (), default_mode: str = semconv.MODE_AUTO) -> None:
        self.default_mode = default_mode
        self._by_scope = {override.scope: override for override in overrides}

    def put(self, override: Override) -> None:
        """Puts `override` in force for its scope."""
        self._by_scope[override.scope] = override

    def remove(self, scope: str) -> None:
        """Takes the override of `scope` away, if there is one."""
        self._by_scope.pop(scope, None)

    def get(self, scope: str, now: float) -> Override | None:
        """The override that is in force for exactly `scope` at Unix time `now`."""
        override = self._by_scope.get(scope)
        return override if override and not _expired(override, now) else None

    def in_force(self, now: float) -> list[Override]:
        """All that hold at `now`, by scope."""
        return sorted(
            (item for item in self._by_scope.values() if not _expired(item, now)), key=lambda item: item.scope
        )

    def expired(self, now: float) -> list[Override]:
        """Those that have run out at `now` and are still on record."""
        return [item for item in self._by_scope.values() if _expired(item, now)]

    def resolve(self, engine_id: str, model: str, backend: str, now: float) -> Override | None:
        """The override that holds for one backend of one engine; None: the default."""
        for scope in (f"engine:{engine_id}", f"backend:{backend}", f"model:{model}", "fleet"):
            if override := self.get(scope, now):
                return override
        return None


def directive(
    engine_id: str, backend: str, override: Override | None, now: float, plan: Plan | None = None,
    default_mode: str = semconv.MODE_AUTO,
) -> Directive:  # fmt: skip
    """What the hook of `engine_id` is asked to do for `backend`; the id changes only when the content does.

    The controller's `plan` counts in `auto` and `observe` only: `on` and `off` are the operator's word.
    """
    mode = override.mode if override else default_mode
    if mode not in (semconv.MODE_AUTO, semconv.MODE_OBSERVE):
        plan = None
    content: dict[str, Any] = {
        "engine_id": engine_id,
        "backend": backend,
        "mode": mode,
        "state": STATE_BYPASS if mode == semconv.MODE_OFF else plan.state if plan else STATE_OPEN,
        "stores": override.stores if override else True,
        "reason": override.reason if override else plan.reason if plan else "",
        "on_lease_expiry": override.on_lease_expiry if override else semconv.LEASE_OPEN,
    }
    asked = plan.coefficients if plan else Coefficients()
    coefficients = {name: getattr(asked, name) for name in ("fetch", "prefill", "classes", "sla")}
    reads = plan.reads if plan else Reads()
    expires_at = override.expires_at if override else None
    # The end, not what is left of it: the id must not change while the time runs down.
    digest = hashlib.sha256(msgspec.json.encode((content, coefficients, reads, expires_at))).hexdigest()[:16]
    left = None if expires_at is None else max(0.0, expires_at - now)
    return Directive(id=digest, ttl_seconds=left, reads=reads, **content, **coefficients)


def etag(directives: Iterable[Directive]) -> str:
    """The tag of a set of directives."""
    return hashlib.sha256("\n".join(item.id for item in directives).encode()).hexdigest()[:16]


def default_on_lease_expiry(mode: str) -> str:
    """What a hook does when the lease runs out, where the operator did not say."""
    return semconv.LEASE_KEEP if mode == semconv.MODE_OFF else semconv.LEASE_OPEN


def _expired(override: Override, now: float) -> bool:
    return override.expires_at is not None and override.expires_at <= now
