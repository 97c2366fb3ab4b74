"""The keyed permutation: a bijection, even, pinned, and as cheap at 10^12 as at 10."""

import tracemalloc

import numpy as np
import pytest

from forge_data import Permutation
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.mark.lane("quick")
@pytest.mark.parametrize("seed", [0, 1, -7])
def test_every_position_gets_a_row_of_its_own(seed):
    for n in range(1, 301):
        rows = Permutation(n, seed, epoch=n % 3)(np.arange(n))
        assert sorted(rows.tolist()) == list(range(n))


GOLDEN = {
    (5, 0, 0): [2, 0, 4, 1, 3],
    (10, 0, 0): [2, 0, 8, 7, 3, 1],
    (10, 0, 1): [3, 8, 0, 2, 1, 6],
    (10, 7, 0): [8, 5, 3, 1, 7, 2],
    (1000, 3, 2): [609, 121, 224, 826, 444, 23],
    (1000000000000, 0, 0): [
        855827156532,
        766814979908,
        610439530831,
        975377350259,
        866860941985,
        32611976450,
    ],
    (1099511627777, -1, 5): [
        358494744846,
        194873540312,
        50304017099,
        858469393240,
        486713586084,
        243736183029,
    ],
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_the_order_is_pinned(key):
    """A change here reorders the data of every run at its resume: raise ORDER_VERSION instead."""
    n, seed, epoch = key
    assert Permutation(n, seed, epoch)(np.arange(min(n, 6))).tolist() == GOLDEN[key]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 7, 16, 37, 100])
def test_rows_are_uniform_over_positions(n):
    """Chi-square over (position, row) of 2000 epochs; mean df, standard deviation sqrt(2 df)."""
    epochs = 2000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), Permutation(n, 11, epoch)(np.arange(n))] += 1
    expected = epochs / n
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    degrees = (n - 1) ** 2
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees) + 4


def test_adjacent_positions_are_unrelated():
    """The mean step between successive rows of a random order is n/3."""
    n = 100_000
    rows = Permutation(n, 0, 0)(np.arange(n))
    assert abs(np.abs(np.diff(rows)).mean() / (n / 3) - 1) < 0.02


def test_F45_no_stored_permutation():
    permutation = Permutation(10**12, seed=0, epoch=9)
    permutation(np.arange(4))
    tracemalloc.start()
    rows = Permutation(10**12, seed=0, epoch=9)(np.array([0, 10**6, 10**12 - 1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024
    assert len(set(rows.tolist())) == 3
    assert 0 <= rows.min() <= rows.max() < 10**12


def test_one_position_gives_what_it_gives_among_many():
    permutation = Permutation(12345, 1, 2)
    alone = [int(permutation(np.array([i]))[0]) for i in range(50)]
    assert alone == permutation(np.arange(50)).tolist()


@pytest.mark.parametrize(
    ("n", "position", "key", "value"),
    [
        (0, 0, "n", 0),
        (1 << 63, 0, "n", 1 << 63),
        (5, 5, "positions", (5, 5)),
        (5, -1, "positions", (-1, -1)),
    ],
)
def test_out_of_range_is_rejected(n, position, key, value):
    with rejects(key, value, "range"):
        Permutation(n, 0, 0)(np.array([position]))
