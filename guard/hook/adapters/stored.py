"""Remembers which prefixes the remote tier holds, so that a skipped hit does not become a rewrite.

A connector that is not asked does not know that a prefix is stored already and writes it again (measured: 15 SETs per
skipped hit). This memory is fed by every lookup and every store of this engine and answers without any traffic. It
holds vLLM's own block hashes, which name a prefix with all that precedes it; they never leave the process.

It knows what this engine has seen since it started. A prefix that only another engine has stored counts as new, and
is written at most once more by each engine.
"""

from collections.abc import Sequence
from typing import Any, Final

LIMIT: Final = 65536
"""Chunks remembered, least recently used first out: about 16 M tokens at 256 tokens per chunk, 10 MB."""


class StoredPrefixes:
    """A bounded set of chunk boundaries that are known to be stored."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._known: dict[Any, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, hashes: Sequence[Any], hash_tokens: int, chunk_tokens: int, end: int) -> None:
        """The first `end` tokens of a prompt are stored."""
        known = self._known
        for chunk in _chunks(hashes, hash_tokens, chunk_tokens, end):
            known.pop(chunk, None)
            known[chunk] = None
        while len(known) > self._limit:
            del known[next(iter(known))]

    def unlearn(self, hashes: Sequence[Any], hash_tokens: int, chunk_tokens: int, start: int) -> None:
        """A lookup ended at `start` tokens: what follows is not stored, or no longer."""
        step = chunk_tokens // hash_tokens if hash_tokens else 0
        if step <= 0 or chunk_tokens % hash_tokens:
            return
        for index in range((start // chunk_tokens + 1) * step - 1, len(hashes), step):
            self._known.pop(hashes[index], None)

    def known(self, hashes: Sequence[Any], hash_tokens: int, chunk_tokens: int) -> int:
        """Tokens at the start of a prompt that are known to be stored, a multiple of the chunk."""
        found = 0
        for number, chunk in enumerate(_chunks(hashes, hash_tokens, chunk_tokens, len(hashes) * hash_tokens), 1):
            if chunk not in self._known:
                break
            found = number
        return found * chunk_tokens


def _chunks(hashes: Sequence[Any], hash_tokens: int, chunk_tokens: int, end: int) -> Sequence[Any]:
    """The hashes at the chunk boundaries up to `end` tokens; none where chunks and hashes do not align."""
    if hash_tokens <= 0 or chunk_tokens <= 0 or chunk_tokens % hash_tokens:
        return ()
    step = chunk_tokens // hash_tokens
    return hashes[step - 1 : min(len(hashes), end // hash_tokens) : step]
