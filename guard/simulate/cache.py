"""Which blocks of KV are held: by one engine, or by the remote store. Least recently used out."""

from collections.abc import Hashable, Sequence


class BlockCache:
    """Up to `blocks` blocks by their hash; a prefix counts up to the first block that is missing."""

    def __init__(self, blocks: int) -> None:
        self._limit = max(1, blocks)
        self._held: dict[Hashable, None] = {}

    def matched(self, blocks: Sequence[Hashable]) -> int:
        """How many of the first blocks are held; they count as used now."""
        held = self._held
        count = 0
        for block in blocks:
            if block not in held:
                break
            count += 1
        for block in blocks[:count]:
            del held[block]
            held[block] = None
        return count

    def peek(self, blocks: Sequence[Hashable]) -> int:
        """As `matched`, but nothing counts as used."""
        return next((number for number, block in enumerate(blocks) if block not in self._held), len(blocks))

    def put(self, blocks: Sequence[Hashable]) -> int:
        """Holds these blocks; returns how many are new."""
        held = self._held
        new = 0
        for block in blocks:
            if block in held:
                del held[block]
            else:
                new += 1
            held[block] = None
        while len(held) > self._limit:
            del held[next(iter(held))]
        return new
