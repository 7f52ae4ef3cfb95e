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
    """Fits y (seconds) on the columns of x (n, p), all >= 0; coefficients come out >= 0."""
    y = np.maximum(y, LEAST_SECONDS)
    scale = np.maximum(x.mean(axis=0), 1e-300)
    z = np.ascontiguousarray((x / scale).T)
    thin = slice(None, None, max(1, y.size // _ENOUGH))
    wt, trust = weights, np.ones_like(y)
    beta, gram = _solve(z, y, weights / np.square(y + middle(y[thin])))
    spread = 0.0
    for _ in range(ROUNDS):
        fitted = np.maximum(beta @ z, LEAST_SECONDS)
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
        beta, gram = _solve(z, y, wt / (fitted * fitted))
    fitted = np.maximum(beta @ z, LEAST_SECONDS)
    error = np.clip(y / fitted - 1.0, -1.0, 3.0)
    beta = beta * math.exp(float(wt @ error) / (float(wt.sum()) or 1.0) - 0.5 * spread * spread)
    scores = np.empty((blocks.count, z.shape[0]))
    influence = wt * error / fitted
    for column in range(z.shape[0]):
        scores[:, column] = blocks.sums(influence * z[column])
    used = int(np.count_nonzero(np.bincount(blocks.of, wt, blocks.count) > 0.0))
    # An M-estimator's bread holds the slope of psi, which is less than the weights: psi' = (1 - u^2)(1 - 5u^2).
    root = np.sqrt(trust)
    total = float(wt.sum()) or 1.0
    steep = total / max(float((weights * root * (5.0 * root - 4.0)).sum()), 0.3 * total)
    bread = _inverse(gram) * (steep * math.sqrt(used / max(used - z.shape[0], 1)))
    return Fit(beta / scale, scores @ bread / scale, max(used - z.shape[0], 1), spread, trust, int(y.size))


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
    return float(np.sort(values)[values.size // 2])


def _inverse(gram: Array) -> Array:
    ridge = 1e-9 * float(np.trace(gram)) / gram.shape[0]
    result: Array = np.linalg.inv(gram + np.eye(gram.shape[0]) * max(ridge, 1e-300))
    return result


def _solve(z: Array, y: Array, w: Array) -> tuple[Array, Array]:
    weighted = z * w
    gram: Array = weighted @ z.T
    return _nonnegative(gram, weighted @ y), gram


def _nonnegative(gram: Array, moment: Array) -> Array:
    """Least squares with b >= 0 from normal equations: drops the most negative coefficient until none is."""
    p = moment.size
    ridge = 1e-9 * float(gram.flat[:: p + 1].sum()) / p or 1.0
    whole: Array = np.linalg.solve(gram + ridge * np.eye(p), moment)
    if whole.min() >= 0.0:
        return whole
    active = list(range(p))
    beta = np.zeros(p)
    while active:
        part = gram[np.ix_(active, active)].copy()
        part.flat[:: len(active) + 1] += ridge
        solved = np.linalg.solve(part, moment[active])
        worst = int(np.argmin(solved))
        if solved[worst] >= 0.0:
            beta[active] = solved
            break
        active.pop(worst)
    return beta
