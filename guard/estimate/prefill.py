"""Prefill time of one engine type: p = (a + b*c + d*c*(n - c/2)) * (1 + load*running)."""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from guard.estimate.blocks import Blocks
from guard.estimate.linear import Fit, fit
from guard.estimate.samples import Array, Samples
from guard.estimate.shapes import PrefillModel

LEAST: Final = 3
"""Fewest requests computed (nearly) in full that say what a hit saves."""

_FEW: Final = 24
_THIN: Final = 512


@dataclass(frozen=True, slots=True)
class Prefill:
    """The model, and its fit; `sizes` are the computed tokens that it rests on, sorted."""

    model: PrefillModel
    fit: Fit
    sizes: Array

    def supports(self, computed: float) -> bool:
        """Whether at least `LEAST` requests computed half of `computed` tokens or more."""
        return int(self.sizes.size - np.searchsorted(self.sizes, 0.5 * computed)) >= LEAST

    def mean(self, prompt: float, computed: float, running: float) -> float:
        """Mean time: the model's median times exp(spread^2/2)."""
        return self.model.seconds(prompt, computed, running) * self.mean_factor

    @property
    def mean_factor(self) -> float:
        """Mean over median of lognormal noise."""
        return math.exp(0.5 * self.model.spread**2)

    def seconds(self, prompt: float, computed: Array, running: float) -> Array:
        """Median times, one for each count of computed tokens."""
        m = self.model
        alone = m.a + m.b * computed + m.d * computed * (prompt - computed / 2.0)
        result: Array = alone * (1.0 + m.load_per_running * running)
        return result

    def saved(self, prompt: float, local: float, matched: float, running: float) -> tuple[float, float, Array]:
        """Mean prefill time that a hit of `matched` tokens saves, its standard error, and what each block did to it."""
        full, rest = prompt - local, max(prompt - local - matched, 1.0)
        value = self.mean(prompt, full, running) - self.mean(prompt, rest, running)
        terms = _terms(np.array([prompt, prompt]), np.array([full, rest]))
        alone = self.fit.beta[:3] @ terms
        row = terms[:, 0] - terms[:, 1]
        if self.fit.beta.size == 4:
            row = np.append(row, running * (alone[0] - alone[1]))
        variance = float(self.fit.covariance(row[None])[0, 0])
        return value, math.sqrt(max(variance, 0.0)) * self.mean_factor, self.fit.influence @ row


def fit_prefill(samples: Samples, weights: Array, blocks: Blocks) -> Prefill | None:
    """The model over the rows that computed anything; None: there are none."""
    n, c, y, running = samples["prompt"], samples["computed"], samples["prefill"], samples["running"]
    used = (c > 0.0) & (y > 0.0) & (n >= c)
    count = int(np.count_nonzero(used))
    if count == 0:
        return None
    sizes = np.sort(c[used])
    straight = count < _FEW or sizes[0] >= 0.9 * sizes[-1]  # one size, or too few to bend a line: time in proportion
    if straight:
        used &= c >= 0.5 * sizes[-1]
    if not used.all():
        n, c, y, running, weights = n[used], c[used], y[used], running[used], weights[used]
        blocks = Blocks(blocks.of[used], blocks.count, blocks.chain)
    if straight:
        proportion = fit(c[None], y, weights, blocks)
        beta = np.array([0.0, proportion.beta[0], 0.0])
        influence = np.zeros((blocks.count, 3))
        influence[:, 1] = proportion.influence[:, 0]
        plain = replace(proportion, beta=beta, influence=influence, n=count)
        return Prefill(PrefillModel(a=0.0, b=float(beta[1]), spread=plain.spread, n=count), plain, sizes)
    terms = _terms(n, c)
    load = 0.0
    if np.ptp(running) > 0.0:
        every = slice(None, None, max(1, y.size // _THIN))
        thin = Blocks(blocks.of[every], blocks.count, blocks.chain)
        first = fit(terms[:, every], y[every], weights[every], thin)
        result = fit(np.vstack((terms, running * (first.beta @ terms))), y, weights, blocks)
        # The load's share was fitted on times that have the mean load in them.
        mean = terms.mean(axis=1)
        load = float(result.beta[3] * (mean @ first.beta) / (mean @ result.beta[:3]))
    else:
        result = fit(terms, y, weights, blocks)
    a, b, d = (float(value) for value in result.beta[:3])
    return Prefill(PrefillModel(a=a, b=b, d=d, load_per_running=load, spread=result.spread, n=count), result, sizes)


def _terms(n: Array, c: Array) -> Array:
    return np.stack((np.ones_like(c), c, c * (n - c / 2.0)))
