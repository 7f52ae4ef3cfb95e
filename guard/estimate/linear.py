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

ROUNDS: Final = 3
_REACH: Final = 4.685  # Tukey's constant: 95 % efficient under normal noise
_LEAST_SPREAD: Final = 0.005
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
    z = x / scale
    w = weights / np.square(y + np.median(y))
    trust = np.ones_like(y)
    beta = _nonnegative(z.T @ (z * w[:, None]), z.T @ (w * y))
    log_y, spread = np.log(y), 0.0
    for _ in range(ROUNDS):
        fitted = np.maximum(z @ beta, LEAST_SECONDS)
        residual = log_y - np.log(fitted)
        residual -= np.median(residual)
        spread = max(1.4826 * float(np.median(np.abs(residual))), _LEAST_SPREAD)
        trust = np.square(np.clip(1.0 - np.square(residual / (_REACH * spread)), 0.0, None))
        w = weights * trust / np.square(fitted)
        gram = z.T @ (z * w[:, None])
        beta = _nonnegative(gram, z.T @ (w * y))
    fitted = np.maximum(z @ beta, LEAST_SECONDS)
    wt = weights * trust
    beta = beta * np.exp(np.average(log_y - np.log(fitted), weights=wt))
    fitted = np.maximum(z @ beta, LEAST_SECONDS)
    error = np.clip(y / fitted - 1.0, -1.0, 3.0)
    scores = np.empty((blocks.count, z.shape[1]))
    influence = wt * error / fitted
    for column in range(z.shape[1]):
        scores[:, column] = blocks.sums(influence * z[:, column])
    used = int(np.count_nonzero(np.bincount(blocks.of, wt, blocks.count) > 0.0))
    bread = np.linalg.pinv(gram, hermitian=True) * math.sqrt(used / max(used - z.shape[1], 1))
    return Fit(beta / scale, scores @ bread / scale, max(used - z.shape[1], 1), spread, trust, int(y.size))


def long_run(influence: Array) -> float:
    """By what factor autocorrelation between blocks raises the variance of the sum of `influence` (AR(1))."""
    whole = float(influence @ influence)
    pairs = influence.size - 1
    if pairs < 6 or not whole > 0.0:
        return 1.0
    rho = float(influence[1:] @ influence[:-1]) / whole
    rho = min(max(rho + (1.0 + 3.0 * rho) / pairs, 0.0), 0.9)
    return (1.0 + rho) / (1.0 - rho)


def _nonnegative(gram: Array, moment: Array) -> Array:
    """Least squares with b >= 0 from normal equations: drops the most negative coefficient until none is."""
    p = moment.size
    active = list(range(p))
    ridge = 1e-9 * np.trace(gram) / p if np.trace(gram) > 0.0 else 1.0
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
