"""While the service does not answer: how long a thread waits before it tries again, and what is logged of it."""

import random
from collections.abc import Callable
from typing import Final

from guard.hook.failsafe import logger

RETRY_AFTER_LIMIT: Final = 60.0
"""Longest `Retry-After` that is followed, seconds."""

_LOG_AGAIN: Final = 300.0


class Backoff:
    """How long to wait after failures: nothing until every endpoint has failed once, then exponentially with jitter."""

    def __init__(self, endpoints: int, *, first: float, longest: float, rng: random.Random) -> None:
        self._endpoints = endpoints
        self._first = first
        self._longest = longest
        self._rng = rng
        self._failures = 0
        self._asked = 0.0

    def failed(self, retry_after: float | None = None) -> float:
        """Counts a failure; returns the seconds to wait before the next attempt."""
        self._failures += 1
        self._asked = max(self._asked, min(retry_after or 0.0, RETRY_AFTER_LIMIT))
        rounds, rest = divmod(self._failures, self._endpoints)
        if rest:
            return 0.0
        wait = min(self._longest, self._first * 2.0 ** min(rounds - 1, 30)) * self._rng.uniform(0.5, 1.0)
        asked, self._asked = self._asked, 0.0
        return max(wait, asked)

    def succeeded(self) -> None:
        """Starts over."""
        self._failures = 0
        self._asked = 0.0


def described(status: int) -> str:
    """An HTTP status for the log, with what to do where that is known."""
    if status == 401:
        return f"{status}: KVGUARD_TOKEN_FILE must hold a token with the scope ingest"
    if status == 403:
        return (
            f"{status}: KVGUARD_TOKEN_FILE must hold a token with the scope ingest; a service without tokens must be"
            " called 127.0.0.1, localhost, or a name of its allowed_hosts"
        )
    return str(status)


class Complaints:
    """Log lines about the service, one per kind every five minutes, so that a dead service does not fill vLLM's log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def say(self, kind: str, message: str, *args: object) -> None:
        """Logs `message` unless the same `kind` was logged lately."""
        now = self._clock()
        if now - self._last.get(kind, float("-inf")) >= _LOG_AGAIN:
            self._last[kind] = now
            logger.warning(message, *args)
