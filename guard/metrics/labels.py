"""Which values a label may have: at most `LABEL_LIMITS[name]`, each a plain short text; anything else is `other`."""

from collections.abc import Mapping, Sequence
from typing import Final

OTHER: Final = "other"
LABEL_LIMITS: Final[Mapping[str, int]] = {
    "model_name": 64, "engine_id": 1024, "vllm_instance": 1024, "engine": 256, "backend": 64, "class": 64,
    "decision": 8, "reason": 64, "outcome": 32, "kind": 48, "status": 32, "cause": 8, "prober": 8, "target": 1024,
    "choice": 4, "bound": 4, "source": 4, "dimension": 4, "value": 32, "state": 8, "mode": 4, "limit": 8,
    "percentile": 16, "version": 4,
}  # fmt: skip
"""One bound for each label, over all metrics that carry it: counters and gauges fold the same values."""

IDLE_SECONDS: Final = 3600.0
"""A value that was not seen for so long makes room, and its series go."""

_LONGEST: Final = 256


class Label:
    """The values that one label may have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[str, float] = {}

    def admit(self, value: str, now: float) -> str:
        """`value`, or `other` when there is no room for it."""
        if value not in self._seen and (
            len(self._seen) >= self._limit or len(value) > _LONGEST or not value.isprintable()
        ):
            return OTHER
        self._seen[value] = now
        return value

    def forget(self, before: float) -> set[str]:
        """Drops the values last seen before `before`, and says which."""
        gone = {value for value, seen in list(self._seen.items()) if seen < before}  # a scrape may add meanwhile
        for value in gone:
            del self._seen[value]
        return gone


class Labels:
    """All labels. Counting and scraping run on different threads; a bound may be passed by one for that."""

    def __init__(self) -> None:
        self._all = {name: Label(limit) for name, limit in LABEL_LIMITS.items()}

    def admit(self, names: Sequence[str], values: Sequence[str], now: float) -> tuple[str, ...]:
        """The values as they may be shown.

        Raises:
            KeyError: a label has no bound in `LABEL_LIMITS`.
            ValueError: not one value per name.
        """
        return tuple(self._all[name].admit(value, now) for name, value in zip(names, values, strict=True))

    def forget(self, before: float) -> dict[str, set[str]]:
        """Drops what was last seen before `before`: label -> values."""
        return {name: gone for name, label in self._all.items() if (gone := label.forget(before))}
