"""The shortcuts of the fits against what they stand for, written out."""

import itertools

import numpy as np
import pytest

from guard.estimate import linear
from guard.estimate.blocks import MOST, cut
from guard.estimate.hinges import Hinges
from guard.estimate.hits import _by_engine


@pytest.mark.parametrize("phi", [0.0, 0.6])
def test_running_sums_are_products_with_the_matrix_of_hinges(phi):
    rng = np.random.default_rng(1)
    n, grid = 80, np.geomspace(0.12, 0.9, 64)
    x, root, vectors = rng.uniform(0.1, 1.0, n), rng.uniform(0.5, 2.0, n), rng.standard_normal((3, n))
    matrix = root[:, None] * np.maximum(x[:, None] - grid, 0.0)
    hinges = Hinges(x, root, grid)
    assert hinges.dot(vectors) == pytest.approx(vectors @ matrix, rel=1e-9, abs=1e-12)
    whitened = matrix.copy()
    whitened[1:] -= phi * matrix[:-1]
    own = np.append(np.full(n - 1, 1.0 + phi * phi), 1.0)
    squares = hinges.squares(own, np.full(n - 1, -phi))
    assert squares == pytest.approx(np.square(whitened).sum(axis=0), rel=1e-9)


def test_no_coefficient_is_negative_and_the_rest_are_least_squares():
    rng = np.random.default_rng(2)
    dropped = 0
    for _ in range(50):
        z, y = rng.uniform(0.0, 1.0, (3, 40)), rng.uniform(0.0, 1.0, 40)
        y = y + z[0] - 0.5 * z[1]
        found = linear._nonnegative(z @ z.T, z @ y)
        assert found.min() >= 0.0
        free = np.flatnonzero(found)
        dropped += 3 - free.size
        whole = np.linalg.lstsq(z[free].T, y, rcond=None)[0]
        assert found[free] == pytest.approx(whole, rel=1e-6)
    assert dropped > 0


def test_blocks_are_pieces_of_stretches_of_one_engine():
    n = 40 * MOST + 17
    engine = np.repeat([0.0, 1.0, 2.0], [n // 2, 30, n - n // 2 - 30])
    blocks = cut(engine, np.full(n, 1e-3))
    size = n // MOST
    for own, rows in itertools.groupby(range(n), key=lambda row: engine[row]):
        mine = blocks.of[np.array(list(rows))]
        lengths = np.unique(mine, return_counts=True)[1]
        assert lengths.size == max(mine.size // size, 1)
        assert set(lengths[:-1]) <= {size}
        assert len(set(blocks.chain[np.unique(mine)])) == 1, own
    assert blocks.count == blocks.of[-1] + 1
    assert np.all(np.diff(blocks.of) >= 0)
    assert list(np.unique(blocks.chain)) == [0, 1, 2]


@pytest.mark.parametrize(("n", "rows"), [(30, 1), (300, 6), (1000, 16), (1500, 16), (4096, 42)])
def test_blocks_of_few_rows_are_fewer(n, rows):
    blocks = cut(np.zeros(n), np.full(n, 1e-3))
    assert set(np.bincount(blocks.of)[:-1]) == {rows}


def test_a_thousand_engines_make_at_least_a_block_each():
    engine = np.sort(np.random.default_rng(3).integers(0, 1000, 4096)).astype(float)
    assert cut(engine, np.full(4096, 1e-3)).count == np.unique(engine).size


def test_rows_of_an_engine_come_together_in_their_order():
    engine = np.random.default_rng(4).integers(0, 1 << 52, 9).astype(float)[np.arange(500) % 9]
    order = _by_engine(engine)
    assert sorted(order) == list(range(500))
    runs = [list(rows) for _, rows in itertools.groupby(order, key=lambda row: engine[row])]
    assert len(runs) == 9
    assert all(run == sorted(run) for run in runs)
