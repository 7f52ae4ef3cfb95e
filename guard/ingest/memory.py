"""Remembers what encoded bytes were found to mean, so that equal bytes are decoded once."""

from typing import Final, TypeVar

LONGEST: Final = 4096
"""Most encoded bytes that are remembered as one entry; what is longer is decoded every time."""

_V = TypeVar("_V")


class Memory(dict[bytes, _V]):
    """What encoded bytes were found to mean. Begins anew when it is full, so no sender can make it grow.

    Entries are bounded as well as their number: a few bodies of one huge attribute would fill the machine.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, encoded: bytes, meaning: _V) -> _V:
        """Remembers, and returns, the meaning."""
        if len(encoded) > LONGEST:
            return meaning
        if len(self) >= self._limit:
            self.clear()
        self[encoded] = meaning
        return meaning
