"""Request classes: prompt-length band x concurrency band. Bounded, so that they can be a metric label."""

from typing import Final

PROMPT_BANDS: Final = (
    "0-512", "512-1k", "1k-2k", "2k-4k", "4k-8k", "8k-16k", "16k-32k", "32k-64k", "64k-128k", "128k+",
)  # fmt: skip
"""Bands of prompt tokens, lower edge inclusive, k = 1024. They double, as the cost of a prefill does at the least."""

CONCURRENCY_BANDS: Final = ("c0-4", "c5-16", "c17-64", "c65+")
"""Bands of requests that run on the engine when this one arrives."""

CLASSES: Final = tuple(f"{prompt}/{running}" for prompt in PROMPT_BANDS for running in CONCURRENCY_BANDS)
"""Every class there can be: 40."""


def class_of(prompt_tokens: int, running: int) -> str:
    """The class of a request, e.g. `1k-2k/c0-4`.

    Args:
        prompt_tokens: length of the prompt in tokens; below 0 counts as 0.
        running: requests that run on the engine, below 0 counts as 0.
    """
    band = (prompt_tokens >> 9).bit_length() if prompt_tokens > 0 else 0  # min and max would cost as much as all else
    if band > 9:
        band = 9
    if running <= 4:
        column = 0
    elif running <= 16:
        column = 1
    else:
        column = 2 if running <= 64 else 3
    return CLASSES[band * 4 + column]
