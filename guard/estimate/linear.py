"""Robust linear fits of times whose noise is in proportion: least squares of relative errors, outliers left out.

    minimise  sum w_i ((y_i - x_i b) / (x_i b))^2,  b >= 0        iterated; w_i is Tukey's bisquare of log(y / fit)

The fit is moved to the median by the mean log residual (noise is about lognormal: a mean would be exp(sd^2/2) higher).
Standard errors by blocks: squares of their influence, times (1 + rho)/(1 - rho) for what neighbours share (AR(1), as
Andrews and Monahan 1992 do before they smooth).
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from guard.estimate.blocks import Blocks
from guard.estimate.samples import Array

ROUNDS: Final = 2
_REACH: Final = 4.685  # Tukey's constant: 95 % efficient under normal noise
_LEAST_SPREAD: Final = 0.005
_ENOUGH: Final = 512  # rows that tell a spread
LEAST_SECONDS: Final = 1e-7


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and what each block did to them; `weights` in [0, 1] say how far a row was believed."""

    beta: Array
    influence: Array  # (blocks, p): sums to about 0; its squares make the covariance
    freedom: int
    spread: float
    weights: Array
    n: int

    def covariance(self, rows: Array) -> Array:
        """Covariance of the combinations `rows @ beta`, moved up for the autocorrelation of the first."""
        moved = self.influence @ rows.T
        result: Array = moved.T @ moved * long_run(moved[:, 0])
        return result

    def scaled(self, by: Array) -> "Fit":
        """The same fit with coefficients in other units."""
        return replace(self, beta=self.beta * by, influence=self.influence * by)


def fit(x: Array, y: Array, weights: Array, blocks: Blocks) -> Fit:
    """Fits y (seconds) on the rows of x (p, n), all >= 0; coefficients come out >= 0."""
    y = np.maximum(y, LEAST_SECONDS)
    room = np.empty_like(x)
    thin = slice(None, None, max(1, y.size // _ENOUGH))
    wt, trust = weights, np.ones_like(y)
    beta, gram = _solve(x, y, weights / np.square(y + middle(y[thin])), room)
    spread = 0.0
    for _ in range(ROUNDS):
        fitted = np.maximum(beta @ x, LEAST_SECONDS)
        ratio = y / fitted
        residual = 0.5 * (ratio - 1.0 / ratio)  # about log(ratio), and cheap
        residual -= middle(residual[thin])
        spread = max(1.4826 * middle(np.abs(residual[thin])), _LEAST_SPREAD)
        residual *= residual
        residual *= -1.0 / (_REACH * spread) ** 2
        residual += 1.0
        trust = np.maximum(residual, 0.0)
        trust *= trust
        wt = weights * trust
        beta, gram = _solve(x, y, wt / (fitted * fitted), room)
    fitted = np.maximum(beta @ x, LEAST_SECONDS)
    error = np.minimum(y / fitted - 1.0, 3.0)
    total = float(wt.sum()) or 1.0
    error *= wt
    beta = beta * math.exp(float(error.sum()) / total - 0.5 * spread * spread)
    np.multiply(x, error / fitted, out=room)
    scores = np.array([blocks.sums(row) for row in room])
    used = int(np.count_nonzero(blocks.sums(wt)))
    freedom = max(used - beta.size, 1)
    # An M-estimator's bread holds the slope of psi, which is less than the weights: psi' = (1 - u^2)(1 - 5u^2).
    steep = total / max(5.0 * total - 4.0 * float(weights @ np.sqrt(trust)), 0.3 * total)
    bread = _inverse(gram) * (steep * math.sqrt(max(used, 1) / freedom))
    return Fit(beta, (bread @ scores).T, freedom, spread, trust, int(y.size))


def long_run(influence: Array) -> float:
    """By what factor autocorrelation between blocks raises the variance of the sum of `influence` (AR(1))."""
    whole = float(influence @ influence)
    pairs = influence.size - 1
    if pairs < 6 or not whole > 0.0:
        return 1.0
    rho = float(influence[1:] @ influence[:-1]) / whole
    rho = min(max(rho + (1.0 + 3.0 * rho) / pairs, 0.0), 0.9)
    return (1.0 + rho) / (1.0 - rho)


def middle(values: Array) -> float:
    """Upper median: numpy's own takes five times as long on a few hundred values."""
    return float(np.partition(values, values.size // 2)[values.size // 2])


def median(values: Array) -> float:
    """Median proper, for few values."""
    ordered = np.sort(values)
    return 0.5 * float(ordered[(values.size - 1) // 2] + ordered[values.size // 2])


def mean(values: Array, weights: Array) -> float:
    """Weighted mean: numpy's own takes four times as long."""
    return float(weights @ values) / float(weights.sum())


def _inverse(gram: Array) -> Array:
    unit, part = _units(gram)
    result: Array = np.linalg.inv(part) / (unit[:, None] * unit)
    return result


def _solve(x: Array, y: Array, w: Array, room: Array) -> tuple[Array, Array]:
    np.multiply(x, w, out=room)
    gram: Array = room @ x.T
    return _nonnegative(gram, room @ y), gram


def _units(gram: Array) -> tuple[Array, Array]:
    """Units in which all columns are of one size, and the normal equations in them, with a little on the diagonal."""
    unit = np.sqrt(gram.diagonal())
    unit[unit == 0.0] = 1.0
    part = gram / (unit[:, None] * unit)
    part.flat[:: unit.size + 1] += 1e-9
    return unit, part


def _nonnegative(gram: Array, moment: Array) -> Array:
    """Least squares with b >= 0 from normal equations: drops the most negative coefficient until none is."""
    unit, part = _units(gram)
    moment = moment / unit
    while True:
        beta: Array = np.linalg.solve(part, moment)
        worst = int(beta.argmin())
        if beta[worst] >= 0.0:
            return beta / unit
        part[worst] = part[:, worst] = moment[worst] = 0.0  # an equation of its own: beta[worst] = 0
        part[worst, worst] = 1.0
