"""The cost of a remote read over RTT: a straight line or a hinge, fitted to one mean per block.

    line    R = alpha + beta*RTT                      hinge    R = alpha + beta*RTT + delta*max(RTT - tau, 0)

Errors of block means are AR(1) (one coefficient, bias-corrected; Prais and Winsten's transform keeps the first block
of a chain). The hinge is profiled over a grid of tau. Three things come of the profile:

- the test: F = ((RSS_line - RSS_hinge)/2) / (RSS_hinge/(N - 5)), whose tail is (RSS_hinge/RSS_line)^((N-5)/2);
- the interval of tau: all tau with RSS(tau) <= RSS_min * (1 + t^2/(N - 5));
- draws of whole curves, line and hinges each with its weight (BIC, all tau alike beforehand), for whatever is computed
  from the curve: so an interval of break-even knows that the shape is not known.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from guard.estimate.blocks import Ints
from guard.estimate.hinges import Hinges
from guard.estimate.samples import Array, Mask

DRAWS: Final = 400
_STEPS: Final = np.linspace(0.0, 1.0, 64)  # of the grid, in ratios
_SIDE_BLOCKS: Final = 3
_SIDE_RATIO: Final = 1.15
"""RTT must have varied by so much on either side of a knee."""
_PARAMETERS: Final = 5  # of a hinge: alpha, beta, delta, tau, and the autocorrelation
_BEFORE: Final = 4  # estimated before: two of the variance, two of the size
_FEWEST: Final = 10  # blocks that autocorrelated ones are worth at the least

_RNG: Final = np.random.default_rng(4)
_NORMAL: Final = _RNG.standard_normal((4, DRAWS))
_STRATA: Final = _RNG.permutation((np.arange(DRAWS) + 0.5) / DRAWS)


class Knots(NamedTuple):
    """Curves: R = alpha + beta*RTT + delta*max(RTT - tau, 0). Arrays of one length, or of length 1."""

    alpha: Array
    beta: Array
    delta: Array
    tau: Array

    def at(self, rtt: float | Array) -> Array:
        """Seconds at `rtt`."""
        value: Array = self.alpha + self.beta * rtt + self.delta * np.maximum(rtt - self.tau, 0.0)
        return value

    def scaled(self, by: float | Array, plus: float | Array = 0.0, slope: float | Array = 0.0) -> "Knots":
        """by*R + plus + slope*RTT."""
        return Knots(self.alpha * by + plus, self.beta * by + slope, self.delta * by, self.tau)

    def crossing(self, target: float | Array, start: float = 0.0) -> Array:
        """The least RTT >= start at which the curve reaches `target`; infinity where it never does."""
        with np.errstate(divide="ignore", invalid="ignore"):
            first = (target - self.alpha) / self.beta
            second = (target - self.alpha + self.delta * self.tau) / (self.beta + self.delta)
        result = np.where((self.beta + self.delta > 0.0) & (second >= self.tau) & (second >= start), second, np.inf)
        result = np.where((self.beta > 0.0) & (first <= self.tau) & (first >= start), first, result)
        found: Array = np.where(self.at(start) >= target, start, result)
        return found


@dataclass(frozen=True, slots=True)
class Curve:
    """What the blocks say: the line, the best hinge, the test between them, the interval of tau, and draws."""

    line: Knots
    slope_error: float
    freedom: int
    hinge: Knots | None
    p_value: float
    low: float | None  # of tau; None: open
    high: float | None
    autocorrelation: float
    draws: Knots
    blocks: int

    @property
    def best(self) -> Knots:
        """The hinge where the line fits worse (5 %), else the line."""
        return self.hinge if self.hinge is not None and self.p_value < 0.05 else self.line


def fit(x: Array, z: Array, weight: Array, chain: Ints) -> Curve | None:
    """Fits block means z (seconds) over x (RTT); `weight` goes as 1/variance. None: fewer than four blocks."""
    n = x.size
    if n < 4 or not np.ptp(x) > 0.0:
        return None
    unit_x, unit_z = float(x.max()), float(np.abs(z).mean()) or 1.0
    xs, root = x / unit_x, np.sqrt(weight / weight.mean())
    grid = _grid(xs)
    hinges = Hinges(xs, root, grid)
    follows = np.append(False, chain[1:] == chain[:-1])
    profile = _Profile(hinges, z / unit_z, 0.0, follows)
    phi = _autocorrelation(profile.residual(), chain, 2 + 2 * (grid.size > 0))
    if phi != 0.0:
        profile = _Profile(hinges, z / unit_z, phi, follows, max((1.0 - phi) / (1.0 + phi), _FEWEST / n))
    return profile.curve(phi, unit_x, unit_z)


class _Profile:
    """Least squares of the line, and of the line and one hinge for every tau of the grid at once."""

    def __init__(self, hinges: Hinges, y: Array, phi: float, follows: Mask, honest: float = 1.0) -> None:
        self.honest, self.grid, self.n = honest, hinges.grid, y.size
        self._hinges = hinges
        # Prais and Winsten: own*v less before*(the v of the block before).
        self._own = np.where(follows, 1.0, math.sqrt(1.0 - phi * phi))
        self._before = np.where(follows, phi, 0.0)[1:]
        base = self._whiten(np.stack((hinges.root, hinges.root * hinges.x)))
        self.y = self._whiten(hinges.root * y)
        self.inverse = np.linalg.inv(np.linalg.qr(base.T, mode="r"))
        self.q = self.inverse.T @ base  # (2, n)
        self.q_y = self.q @ self.y
        self.rest_y = self.y - self.q_y @ self.q
        self.rss_line = max(float(self.rest_y @ self.rest_y), 1e-18)
        vectors = np.concatenate((self.q, self.rest_y[None]))
        back = vectors * self._own
        back[:, :-1] -= self._before * vectors[:, 1:]
        products = hinges.dot(back)
        self.projected = products[:2]
        own = np.square(self._own)
        own[:-1] += np.square(self._before)
        size = hinges.squares(own, -self._own[1:] * self._before) - np.square(self.projected).sum(axis=0)
        self.size = np.maximum(size, 1e-12)
        self.delta = products[2] / self.size
        self.rss = np.maximum(self.rss_line - np.square(self.delta) * self.size, 1e-18)

    def _whiten(self, values: Array) -> Array:
        result: Array = values * self._own
        result[..., 1:] -= self._before * values[..., :-1]
        return result

    def residual(self) -> Array:
        """Residuals of the best hinge, or of the line where there is no grid."""
        result: Array = self.rest_y
        if self.grid.size:
            best = int(np.argmin(self.rss))
            hinge = self._whiten(self._hinges.root * np.maximum(self._hinges.x - self.grid[best], 0.0))
            result = result - self.delta[best] * (hinge - self.projected[:, best] @ self.q)
        return result

    def curve(self, phi: float, unit_x: float, unit_z: float) -> Curve:
        """All that comes of the profile, in the caller's units."""
        freedom = max(round(self.n * self.honest) - 3, 1)
        inverse = self.inverse
        line = inverse @ self.q_y
        slope = unit_z / unit_x
        error = math.sqrt(self.rss_line / freedom) * abs(float(inverse[1, 1])) * slope
        hinge, p, low, high = None, 1.0, None, None
        if self.grid.size:
            best = int(np.argmin(self.rss))
            left = max(round(self.n * self.honest) - _PARAMETERS, 1)
            p = (self.rss[best] / self.rss_line) ** (left / 2.0)
            base = inverse @ (self.q_y - self.projected[:, best] * self.delta[best])
            hinge = _knots(base[0], base[1], self.delta[best], self.grid[best], unit_x, unit_z)
            low, high = self._interval(best, left, unit_x)
        return Curve(
            line=_knots(line[0], line[1], 0.0, 0.0, unit_x, unit_z), slope_error=error, freedom=freedom, hinge=hinge,
            p_value=float(p), low=low, high=high, autocorrelation=phi,
            draws=self._draw(inverse, unit_x, unit_z), blocks=self.n,
        )  # fmt: skip

    def _interval(self, best: int, freedom: int, unit: float) -> tuple[float | None, float | None]:
        inside = self.rss <= self.rss[best] * (1.0 + t_squared(freedom) / freedom)
        first, last = int(np.argmax(inside)), int(inside.size - 1 - np.argmax(inside[::-1]))
        limit = self.rss[best] * (1.0 + t_squared(freedom) / freedom)
        low = None if first == 0 else self._between(first - 1, first, limit) * unit
        high = None if last == inside.size - 1 else self._between(last + 1, last, limit) * unit
        return low, high

    def _between(self, outside: int, inside: int, limit: float) -> float:
        a, b = self.rss[outside], self.rss[inside]
        share = (a - limit) / (a - b) if a > b else 0.0
        return float(self.grid[outside] + share * (self.grid[inside] - self.grid[outside]))

    def _draw(self, inverse: Array, unit_x: float, unit_z: float) -> Knots:
        half = self.n / 2.0
        logs = np.append(-half * math.log(self.rss_line), -half * np.log(self.rss))
        if self.grid.size:
            logs[1:] -= 0.5 * math.log(self.n) + math.log(self.grid.size)
        odds = np.exp(logs - logs.max())
        total = np.cumsum(odds)
        chosen = np.searchsorted(total, _STRATA * total[-1])
        chosen = np.minimum(chosen, odds.size - 1)
        hinged, index = chosen > 0, np.maximum(chosen - 1, 0)
        rss = np.append(self.rss_line, self.rss)[chosen]
        freedom = np.maximum(self.n * self.honest - np.where(hinged, _PARAMETERS, 3) - _BEFORE, 1.0)
        sigma = np.sqrt(rss / _chi_squared(freedom, _NORMAL[0]))
        if self.grid.size:
            delta = np.where(hinged, self.delta[index] + sigma * _NORMAL[1] / np.sqrt(self.size[index]), 0.0)
            tau, part = self.grid[index], self.projected[:, index] * delta
        else:
            delta, tau, part = np.zeros(DRAWS), np.zeros(DRAWS), np.zeros((2, DRAWS))
        base = inverse @ (self.q_y[:, None] - part + sigma * _NORMAL[2:])
        return _knots(base[0], base[1], delta, tau, unit_x, unit_z)


def t_squared(freedom: float) -> float:
    """Square of the 97.5 % point of Student's t (Cornish and Fisher's expansion; within 1 % from 3 degrees up)."""
    z, v = 1.959964, max(freedom, 1.0)
    if v < 3.0:
        return 12.706**2 if v < 2.0 else 4.303**2
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return t * t


def _chi_squared(freedom: Array, normal: Array) -> Array:
    """Wilson and Hilferty's approximation of chi squared from standard normals."""
    part = 2.0 / (9.0 * freedom)
    value: Array = freedom * np.maximum(1.0 - part + normal * np.sqrt(part), 0.1) ** 3
    return value


def _grid(x: Array) -> Array:
    """Where a hinge may be: with enough blocks, and enough variation of RTT, on either side."""
    ordered = np.sort(x)
    if ordered.size < 2 * _SIDE_BLOCKS + 2:
        return np.zeros(0)
    above = ordered[ordered >= ordered[0] * _SIDE_RATIO]
    below = ordered[ordered <= ordered[-1] / _SIDE_RATIO]
    if not above.size or not below.size:
        return np.zeros(0)
    low, high = max(above[0], ordered[_SIDE_BLOCKS - 1]), min(below[-1], ordered[-_SIDE_BLOCKS])
    return low * (high / low) ** _STEPS if 0.0 < low < high else np.zeros(0)


def _autocorrelation(residual: Array, chain: Ints, parameters: int) -> float:
    """Lag-1 autocorrelation of residuals within chains, moved up for the bias of about (1 + 3 phi + p)/N."""
    same = chain[1:] == chain[:-1]
    pairs = int(np.count_nonzero(same))
    whole = float(residual @ residual)
    if pairs < 6 or not whole > 0.0:
        return 0.0
    phi = float((residual[1:] * residual[:-1])[same].sum()) / whole * (residual.size / pairs)
    phi += (1.0 + 3.0 * phi + parameters / 2.0) / pairs
    return min(max(phi, 0.0), 0.95)


def _knots(alpha: object, beta: object, delta: object, tau: object, unit_x: float, unit_z: float) -> Knots:
    slope = unit_z / unit_x
    return Knots(
        np.atleast_1d(np.asarray(alpha, np.float64)) * unit_z, np.atleast_1d(np.asarray(beta, np.float64)) * slope,
        np.atleast_1d(np.asarray(delta, np.float64)) * slope, np.atleast_1d(np.asarray(tau, np.float64)) * unit_x,
    )  # fmt: skip
