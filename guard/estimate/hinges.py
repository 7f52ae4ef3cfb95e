"""Sums over hinges max(x - tau, 0) for many tau at once, from running sums instead of a matrix of all hinges."""

import numpy as np

from guard.estimate.blocks import Ints
from guard.estimate.samples import Array


class Hinges:
    """Sums over the blocks above every tau of the grid: what a matrix of all hinges would be multiplied for."""

    def __init__(self, x: Array, root: Array, grid: Array) -> None:
        self.x, self.root, self.grid = x, root, grid
        self._order, self._above = _above(x, grid)
        # Of two neighbours' hinges the product is not 0 where both are above tau.
        self._pairs, self._above_pairs = _above(np.minimum(x[1:], x[:-1]), grid)

    def dot(self, vectors: Array) -> Array:
        """Products of `vectors` (k, n) with the hinges root*max(x - tau, 0): (k, grid)."""
        flat = vectors * self.root
        sums = _sums(np.concatenate((flat, flat * self.x)), self._order, self._above)
        result: Array = sums[len(vectors) :] - self.grid * sums[: len(vectors)]
        return result

    def squares(self, own: Array, next_: Array) -> Array:
        """Sums of own*h*h + 2*next_*h*(the next block's h), h the hinges: (grid)."""
        x, w = self.x, own * np.square(self.root)
        level, slope, square = _sums(np.stack((w, 2.0 * w * x, w * x * x)), self._order, self._above)
        if next_.any():
            u = 2.0 * next_ * self.root[1:] * self.root[:-1]
            pair = np.stack((u, u * (x[1:] + x[:-1]), u * x[1:] * x[:-1]))
            more = _sums(pair, self._pairs, self._above_pairs)
            level, slope, square = level + more[0], slope + more[1], square + more[2]
        result: Array = square - self.grid * (slope - self.grid * level)
        return result


def _above(x: Array, grid: Array) -> tuple[Ints, Ints]:
    """Indices of x from the largest down, and how many are above every value of the grid."""
    order = np.argsort(-x)
    return order, np.searchsorted(-x[order], -grid)


def _sums(terms: Array, order: Ints, above: Ints) -> Array:
    total = np.zeros((terms.shape[0], terms.shape[1] + 1))
    np.cumsum(terms.take(order, axis=1), axis=1, out=total[:, 1:])
    return total.take(above, axis=1)
