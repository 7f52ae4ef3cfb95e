"""The cost of a reference read over RTT, or its level where RTT stands still; whether it still holds."""

import math
from typing import Final

import numpy as np

from guard.estimate import curve as curves
from guard.estimate import inflection
from guard.estimate.curve import Curve, Knots
from guard.estimate.hits import Hits, Rows
from guard.estimate.samples import Array

_RECENT: Final = 8


def curve_of(rows: Rows, hits: Hits) -> tuple[Curve | None, Knots]:
    """The cost over RTT from block means where RTT varied; and its level without regard to RTT, in draws."""
    w = hits.weights * hits.trust
    count = np.bincount(hits.of, w, rows.blocks.count)
    used = count > 0.05 * count.max()
    z = np.bincount(hits.of, w * hits.remote, rows.blocks.count)[used] / count[used]
    x = np.bincount(hits.of, w * hits.rtt, rows.blocks.count)[used] / count[used]
    chain = rows.blocks.chain[used]
    level, variance = _moments(rows, hits, w, count, used, z, x)
    flat = Knots(level, np.zeros(1), np.zeros(1), np.zeros(1))
    if not rows.varies or not x.size or float(x.max()) <= 0.0:
        return None, flat
    return curves.fit(x, z, count[used] / variance, chain), flat


def _moments(rows: Rows, hits: Hits, w: Array, count: Array, used: Array, z: Array, x: Array) -> tuple[Array, Array]:
    """Draws of the overall mean, and the variance of single rows per block: v0 + v1*level^2, from within blocks.

    The level is a line through the block means: weights by the means themselves would favour those that came out low.
    """
    mean = np.zeros(rows.blocks.count)
    mean[used] = z
    square = np.bincount(hits.of, w * np.square(hits.remote - mean[hits.of]), rows.blocks.count)[used] / count[used]
    level = np.full(z.size, float(np.average(z, weights=count[used])))
    if rows.varies and z.size > 2 and np.ptp(x) > 0.0:
        apart = x - float(np.average(x, weights=count[used]))
        share = count[used] / level
        level += apart * float((share * apart) @ z) / float((share * apart) @ apart)
        level = np.maximum(level, 0.25 * float(z.min()))
    level2 = np.square(level)
    typical = float(np.median(level2))
    a = np.column_stack((np.full(z.size, typical), level2)) / (level2 + typical)[:, None]
    b = square / (level2 + typical)
    v1 = float(np.average(b * (level2 + typical) / level2, weights=count[used]))
    if z.size >= 6:
        solved = np.linalg.lstsq(a, b, rcond=None)[0]
        v0, v1 = (float(value) for value in solved)
        if v0 < 0.0 or v1 < 0.0:
            v0, v1 = (0.0, float(a[:, 1] @ b / (a[:, 1] @ a[:, 1]))) if v0 < v1 else (
                float(a[:, 0] @ b / (a[:, 0] @ a[:, 0])), 0.0)  # fmt: skip
    else:
        v0 = 0.0
    variance = v0 * typical + v1 * level2
    variance = np.maximum(variance, 1e-8 * typical + 1e-18)
    overall = float(np.average(z, weights=count[used]))
    effective = max(z.size - 1, 1)
    if z.size > 1:
        error = math.sqrt(float(np.average(np.square(z - overall), weights=count[used])) / effective)
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
    line = curve.draws if curve is not None else None
    expected: Array
    if line is not None:
        hinge = curve.hinge if curve is not None and curve.hinge is not None else None
        best = (
            hinge if hinge is not None and curve is not None and curve.p_value < 0.05 else curve.line if curve else line
        )
        expected = np.maximum(best.at(hits.rtt), 1e-9)
    else:
        expected = np.full(hits.remote.size, max(float(np.average(hits.remote, weights=hits.trust + 1e-9)), 1e-9))
    ratio = np.log(np.maximum(hits.remote, 1e-9) / expected)
    last = ratio[np.argsort(hits.rows["at"], kind="stable")[-_RECENT:]]
    usual = max(1.4826 * float(np.median(np.abs(ratio - np.median(ratio)))), 0.01)
    middle = float(np.median(last))
    if np.all(np.sign(last) == np.sign(middle)) and abs(middle) > max(4.0 * usual, 0.5):
        return math.exp(middle)
    return 1.0
