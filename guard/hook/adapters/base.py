"""What the hook asks of a connector family, with answers that are safe for any connector.

An adapter holds the guarded connector object and touches its internals only by names that it has checked for. Every
method may raise: the caller counts the error and goes on as if the adapter were not there.
"""

from collections.abc import Collection
from typing import Any

from guard.connectors import Capability
from guard.hook.adapters.stored import StoredPrefixes


class Adapter:
    """The safe default: refuses by not asking (`skip`) where the table allows it, and by reporting no match."""

    def __init__(self, connector: Any, capability: Capability, stored: StoredPrefixes | None = None) -> None:
        self.connector = connector
        self.capability = capability
        self.stored = StoredPrefixes(0) if stored is None else stored

    # -- scheduler side --

    def lookup_starts_early(self, request: Any) -> bool:  # noqa: ARG002
        """True when the lookup of this request starts in `on_new_request`, so that a skip must act there."""
        return False

    def skip(self, request: Any, local_tokens: int) -> bool:  # noqa: ARG002
        """Puts the connector into the state in which not asking it is safe; False when that cannot be done."""
        return self.capability.skip

    def may_decline(self, request: Any) -> bool:  # noqa: ARG002
        """False when reporting no match would break the connector for this request."""
        return self.capability.decline

    def declined(self, request: Any, local_tokens: int) -> None:
        """The connector matched and vLLM is told (0, False): puts right what the connector noted about the match."""

    def answered(self, request: Any, local_tokens: int, matched: int) -> int:  # noqa: ARG002
        """The first answer to a lookup. Returns the store's round trips that it took, -1 where not known."""
        return -1

    def stop_stores(self) -> None:
        """Before the connector builds a step's metadata: turns its stores off, where a switch exists."""

    def resume_stores(self) -> None:
        """After it: turns them on again. Must not raise."""

    def meta_built(self, meta: Any, *, stores: bool) -> None:
        """The step's metadata is there: takes stores out of it where there is no switch, learns from the others."""

    def forget(self, request_id: str) -> None:
        """A request has finished."""

    # -- worker side --

    def pending_stores(self) -> dict[str, int]:
        """Stores under way in this process: tokens by request id."""
        return {}

    def failed_loads(self) -> Collection[str]:
        """Requests of which this rank knows that a load failed, where it names them."""
        return ()
