"""The cells of all models and backends: the pool of each, then its classes."""

from collections.abc import Iterable
from typing import Final

from guard.estimate.cell import HALF_LIFE, estimate, hits_in, thin
from guard.estimate.samples import Samples, pooled
from guard.estimate.shapes import POOL, Cell

THIN: Final = 50
"""A class with fewer reads than this takes the pool's models, unless it is all there is."""


def fit_samples(cells: Iterable[tuple[str, str, str, Samples]], *, half_life: float = HALF_LIFE) -> list[Cell]:
    """Cells of samples by model, backend and class, which must be sorted by them; a backend without a name has none."""
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
