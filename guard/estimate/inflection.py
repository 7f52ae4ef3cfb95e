"""Departure, break-even and knee as figures, from draws of everything they rest on.

    departure    rest + R(RTT) = (1 + g) * (rest + R(floor))
    break-even   h * (R(RTT) - s) + (1 - h) * M(RTT) = 0

R is the mean time of lookup and fetch of the reference hit, s the mean prefill that it saves, M a lookup that finds
nothing, h the share of hits among those looked up. The interval is the middle 95 % of the draws: a ratio estimate.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from guard.estimate.curve import DRAWS, Curve, Knots
from guard.estimate.samples import Array
from guard.estimate.shapes import Figure

DEPARTURE_SHARE: Final = 0.10
KNEE_P: Final = 0.002
"""Level of the knee's test: at most 1 in 100 straight lines may pass after the search over tau."""

KNEE_BEND: Final = 1.5
"""A knee bends the slope by at least this factor..."""

KNEE_RISE: Final = 0.05
"""...and lifts TTFT at twice its RTT by at least this share: two identical runs differ by so much."""

REACH: Final = 3.0
"""A crossing is told up to so many times the highest RTT seen (`projected` above it)."""

_FEWEST: Final = 20  # blocks that tell a correlation
_MOST: Final = 0.9

_RNG: Final = np.random.default_rng(14)
_SAVED, _REST, _MISS, _SLOPE = _RNG.standard_normal((4, DRAWS))
_HITS: Final = _RNG.standard_normal(DRAWS)
LEVEL: Final = _RNG.standard_normal(DRAWS)
"""Standard normals for draws of a level that has no curve."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Means with standard errors, seconds: what a hit saves, the rest of TTFT, a lookup that finds nothing; h."""

    saved: tuple[float, float]
    rest: tuple[float, float]
    miss: tuple[float, float, Array]  # level, slope over RTT, covariance
    hit: tuple[float, float]
    common: tuple[float, Array]
    """Correlation of what a hit saves with what reads cost, and draws of that cost in standard deviations."""

    def draw_saved(self) -> Array:
        """Draws of the prefill that a hit saves."""
        alike, cost = self.common
        drawn: Array = self.saved[0] + self.saved[1] * (alike * cost + (1.0 - alike * alike) ** 0.5 * _SAVED)
        return drawn

    def draw_rest(self) -> Array:
        """Draws of what TTFT takes besides lookup and fetch."""
        drawn: Array = np.maximum(self.rest[0] + self.rest[1] * _REST, 0.0)
        return drawn

    def draw_hit(self) -> Array:
        """Draws of the hit share."""
        drawn: Array = np.clip(self.hit[0] + self.hit[1] * _HITS, 0.0, 1.0)
        return drawn

    def draw_miss(self) -> tuple[Array, Array]:
        """Draws of level and slope of a lookup that finds nothing."""
        level, slope, cov = self.miss
        first = max(float(cov[0, 0]), 0.0) ** 0.5
        part = float(cov[0, 1]) / first if first > 0.0 else 0.0
        second = max(float(cov[1, 1]) - part * part, 0.0) ** 0.5
        return level + first * _MISS, slope + part * _MISS + second * _SLOPE


NOTHING: Final = (0.0, np.zeros(DRAWS))
"""What has nothing in common."""


def in_common(cost: Array, pull: Array, other: Array) -> tuple[float, Array]:
    """`Parts.common` of draws of a cost, and of what each block did to the cost and to what a hit saves.

    Requests of one time are slow together, in reads and prefill (correlation above 0); and requests that read tell the
    prefill of the rest, which a hit does not save (below 0).
    """
    used = pull != 0.0
    pull, other = pull[used], other[used]
    whole = float(pull @ pull) * float(other @ other)
    level, error = float(cost.mean()), float(cost.std())
    if pull.size < _FEWEST or not whole > 0.0 or not error > 1e-9 * abs(level):  # or the error is of rounding
        return NOTHING
    alike = min(max(float(pull @ other) / whole**0.5, -_MOST), _MOST)
    return alike, (cost - level) / error


def net(curve: Knots, parts: Parts) -> Knots:
    """What choosing remote costs over RTT, in draws: below 0 it pays."""
    hit = parts.draw_hit()
    level, slope = parts.draw_miss()
    return curve.scaled(hit, (1.0 - hit) * level - hit * parts.draw_saved(), (1.0 - hit) * slope)


def departure(curve: Curve, parts: Parts, floor: float, high: float, n: int) -> Figure:
    """RTT at which projected TTFT of the reference request exceeds its baseline at the floor RTT by 10 %."""
    rest, draws = parts.draw_rest(), curve.draws
    target = (1.0 + DEPARTURE_SHARE) * (rest + draws.at(floor)) - rest
    return _figure(draws.crossing(target, floor), high, n, "TTFT does not rise by 10 %")


def break_even(curve: Curve, parts: Parts, high: float, n: int) -> Figure:
    """RTT at which choosing remote costs as much as recomputing."""
    if parts.hit[0] <= 0.0:
        return Figure(value=None, n=n, reason="none: no lookup hit, so that remote never pays")
    found = _figure(net(curve.draws, parts).crossing(0.0), high, n, "remote pays at every RTT seen")
    if found.value == 0.0:
        return Figure(value=None, high=found.high, n=n, reason="none in range: remote loses at every RTT")
    return found


def knee(curve: Curve, parts: Parts, n: int) -> Figure:
    """The knee where one is claimed; else no value and why not."""
    hinge = curve.hinge
    if hinge is None:
        return Figure(value=None, n=n, reason="insufficient-data: too few blocks on either side of any RTT")
    tau, beta, delta = float(hinge.tau[0]), max(float(hinge.beta[0]), 0.0), float(hinge.delta[0])
    base = parts.rest[0] + float(hinge.at(tau)[0])
    if curve.p_value > KNEE_P:
        why = f"a straight line fits as well (p = {curve.p_value:.2g})"
    elif delta <= 0.0:
        why = "the slope falls with RTT"
    elif beta + delta < KNEE_BEND * beta:
        why = f"the slope changes by a factor of {(beta + delta) / beta:.2f} only"
    elif delta * tau < KNEE_RISE * base:
        why = "TTFT bends by less than 5 % at twice the RTT"
    elif curve.low is None or curve.high is None:
        why = "the RTT seen does not enclose it"
    elif curve.high - curve.low >= 2.0 * tau:
        why = "its interval is wider than twice itself"
    else:
        return Figure(value=tau, low=curve.low, high=curve.high, n=n)
    return Figure(value=None, n=n, reason=f"no-knee: {why}")


def interval(draws: Array) -> tuple[float, float, float]:
    """Median and the ends of the middle 95 % of draws."""
    ordered = np.sort(draws)
    last = ordered.size - 1
    low, middle, high = (float(ordered[round(q * last)]) for q in (0.025, 0.5, 0.975))
    return middle, low, high


def _figure(draws: Array, highest: float, n: int, never: str) -> Figure:
    middle, low, high = interval(draws)
    limit = REACH * highest
    if middle > limit:
        return Figure(
            value=None, low=low if low <= limit else None, n=n, source="projected" if low > highest else "measured",
            reason=f"none in range: {never} up to {highest * 1e3:.3g} ms, the highest RTT seen",
        )  # fmt: skip
    return Figure(
        value=middle, low=low, high=high if high <= limit else None, n=n,
        source="measured" if middle <= highest else "projected",
        reason="" if middle <= highest else "beyond the RTT seen: extrapolated",
    )  # fmt: skip
