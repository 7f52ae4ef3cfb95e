"""The cost of a reference read over RTT, or its level where RTT stands still; whether it still holds."""

import math
from typing import Final

import numpy as np

from guard.estimate import curve as curves
from guard.estimate import inflection
from guard.estimate.blocks import Ints
from guard.estimate.curve import Curve, Knots
from guard.estimate.hits import Hits, Rows
from guard.estimate.linear import mean as mean_of
from guard.estimate.linear import median, middle
from guard.estimate.samples import Array

_RECENT: Final = 8
_FACTOR: Final = 0.5  # of logs: 1.65


def curve_of(rows: Rows, hits: Hits) -> tuple[Curve | None, Knots, Array]:
    """The cost over RTT from block means where RTT varied; its level without regard to RTT, in draws.

    And what each block did to the cost: by how much it lies off, times its weight.
    """
    w = hits.weights * hits.trust
    count = np.bincount(hits.of, w, rows.blocks.count)
    used = count > 0.05 * count.max()
    z = np.bincount(hits.of, w * hits.remote, rows.blocks.count)[used] / count[used]
    x = np.bincount(hits.of, w * hits.rtt, rows.blocks.count)[used] / count[used]
    chain = rows.blocks.chain[used]
    level, variance = _moments(rows, hits, w, count, used, z, x)
    flat = Knots(level, np.zeros(1), np.zeros(1), np.zeros(1))
    weight = count[used] / variance
    curve = curves.fit(x, z, weight, chain) if rows.varies and x.size and float(x.max()) > 0.0 else None
    best = curve.best if curve is not None else Knots(np.array([mean_of(z, weight)]), *np.zeros((3, 1)))
    pull = np.zeros(rows.blocks.count)
    pull[used] = weight * (z - best.at(x))
    return curve, flat, pull


def _moments(rows: Rows, hits: Hits, w: Array, count: Array, used: Array, z: Array, x: Array) -> tuple[Array, Array]:
    """Draws of the overall mean, and the variance of single rows per block: v0 + v1*level^2, from within blocks.

    The level is a line through the block means: weights by the means themselves would favour those that came out low.
    """
    mean = np.zeros(rows.blocks.count)
    mean[used] = z
    share = count[used]
    square = np.bincount(hits.of, w * np.square(hits.remote - mean.take(hits.of)), rows.blocks.count)[used] / share
    overall = mean_of(z, share)
    level = np.full(z.size, overall)
    if rows.varies and z.size > 2 and np.ptp(x) > 0.0:
        apart = x - mean_of(x, share)
        level += apart * (float((share * apart) @ z) / float((share * apart) @ apart))
        level = np.maximum(level, 0.25 * float(z.min()))
    level2 = np.square(level)
    typical = median(level2)
    v0, v1 = 0.0, mean_of(square / level2, share)
    if z.size >= 6:
        a = np.stack((np.full(z.size, typical), level2)) / (level2 + typical)
        gram, moment = a @ a.T, a @ (square / (level2 + typical))
        gram.flat[::3] += 1e-10 * np.trace(gram)  # where the level is the same everywhere, half of each
        v0, v1 = (float(value) for value in np.linalg.solve(gram, moment))
        if v0 < 0.0 or v1 < 0.0:
            v0, v1 = (0.0, float(moment[1] / gram[1, 1])) if v0 < v1 else (float(moment[0] / gram[0, 0]), 0.0)
    variance = v0 * typical + v1 * level2
    variance = np.maximum(variance, 1e-8 * typical + 1e-18)
    effective = max(z.size - 1, 1)
    if z.size > 1:
        error = math.sqrt(mean_of(np.square(z - overall), share) / effective)
        error *= curves.t_squared(effective) ** 0.5 / 1.96
    else:
        error = overall
    return np.maximum(overall + error * inflection.LEVEL, 0.0), variance


def recent_factor(hits: Hits, curve: Curve | None) -> float:
    """By what factor the last hits differ from what all of them say, where that is beyond doubt; else 1.

    A store that slows in the middle of a run makes old samples wrong before they are forgotten.
    """
    if hits.remote.size < 2 * _RECENT:
        return 1.0
    if curve is None:
        level = np.array([mean_of(hits.remote, hits.trust + 1e-9)])
        best = Knots(level, np.zeros(1), np.zeros(1), np.zeros(1))
    else:
        best = curve.best

    def apart(chosen: Ints | slice) -> Array:
        result: Array = np.log(np.maximum(hits.remote[chosen], 1e-9) / np.maximum(best.at(hits.rtt[chosen]), 1e-9))
        return result

    last = apart(np.argpartition(hits.rows["at"], -_RECENT)[-_RECENT:])
    centre = median(last)
    if abs(centre) <= _FACTOR or not np.all(np.sign(last) == np.sign(centre)):
        return 1.0
    every = apart(slice(None))
    usual = max(1.4826 * middle(np.abs(every - middle(every))), 0.01)
    return math.exp(centre) if abs(centre) > 4.0 * usual else 1.0
