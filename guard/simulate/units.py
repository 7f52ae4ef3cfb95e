"""Durations as people write them: `200us`, `1.5ms`, `2s`, `3min`."""

import re
from typing import Final

_PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60, "h": 1 / 3600}


def seconds(value: object) -> float:
    """Seconds of `200us`, `1.5ms`, `2s`, `3min`, `1h` or a plain number of seconds.

    Raises:
        ValueError: it is none of these, or below 0.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|h)", value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{value!r} is not a time: write 200us, 1.5ms, 2s, 3min, 1h or a number of seconds")
    return float(found[1]) / _PER_SECOND[found[2]]
