"""What a remote read costs and saves, where the inflection lies, and how sure that is. Pure: numpy in, shapes out."""

from collections.abc import Iterable
from typing import Final

import polars as pl

from guard.estimate.cell import HALF_LIFE, estimate, hits_in, thin
from guard.estimate.samples import Samples, of_frame, pooled
from guard.estimate.shapes import Cell

POOL: Final = "all"
"""Class of the pooled cell of a model and backend."""

THIN: Final = 50
"""A class with fewer reads than this takes the pool's models, unless it is all there is."""


def fit(frame: pl.DataFrame, *, half_life: float = HALF_LIFE, simulated: bool = False) -> list[Cell]:
    """Cells of a window's frame (`guard.correlate.window.SCHEMA`): per model and backend the pool, then its classes.

    Hand-offs, aborted, clamped and (unless asked for) simulated requests are left out, duplicates count once.
    """
    return fit_samples(of_frame(frame, simulated=simulated), half_life=half_life)


def fit_samples(cells: Iterable[tuple[str, str, str, Samples]], *, half_life: float = HALF_LIFE) -> list[Cell]:
    """As `fit`, from samples by model, backend and class, sorted by them."""
    groups: dict[tuple[str, str], dict[str, Samples]] = {}
    for model, backend, class_, samples in cells:
        groups.setdefault((model, backend), {})[class_] = samples
    result = []
    for (model, backend), classes in groups.items():
        if not backend:
            continue  # never saw a remote tier
        parts = list(classes.values())
        pool, prefill = estimate(model, backend, POOL, pooled(parts), half_life=half_life)
        result.append(pool)
        for class_, samples in classes.items():
            if len(classes) > 1 and hits_in(samples) < THIN <= hits_in(parts):
                own = Cell(model=model, backend=backend, class_=class_, n=len(samples))
                result.append(thin(own, pool))
            else:
                result.append(estimate(model, backend, class_, samples, pool=prefill, half_life=half_life)[0])
    return result


__all__ = ["POOL", "THIN", "Cell", "fit", "fit_samples"]
