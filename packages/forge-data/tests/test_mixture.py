"""A mixture deals instances as a brute-force list does, at any distance."""

from __future__ import annotations

import random
import sys
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from forge_data.mixture import Mixture, Phase, _order, integer_shares
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def _listed(mixture, count):
    """(source, own) of the first instances, asked for in odd parts."""
    draw, found, start = random.Random(count), [], 0
    while start < count:
        stop = min(count, start + draw.randint(1, 700))
        found += zip(*(part.tolist() for part in mixture.locate(np.arange(start, stop))))
        start = stop
    return found


def _random(seed):
    draw = random.Random(seed)
    sources = draw.randint(1, 6)
    starts = sorted({0, *(draw.randint(1, 3000) for _ in range(draw.randint(0, 3)))})
    phases = []
    for start in starts:
        weights = [
            draw.choice([0.0, 1.0, draw.random(), 10 * draw.random()]) for _ in range(sources)
        ]
        weights[draw.randrange(sources)] = 0.5
        phases.append(Phase(start, tuple(weights)))
    limits = [draw.choice([None, draw.randint(0, 900)]) for _ in range(sources)]
    return phases, limits


@pytest.mark.lane("quick")
@pytest.mark.parametrize("seed", range(60))
def test_each_source_comes_in_order_and_its_count_never_drifts(seed):
    phases, limits = _random(seed)
    mixture = Mixture(phases, limits)
    count = 5000 if mixture.end is None else mixture.end
    given = [0] * len(limits)
    began, shares = list(given), None
    for position, (source, own) in enumerate(_listed(mixture, count)):
        phase = [p for p in phases if p.start <= position][-1]
        alive = tuple(
            w if limit is None or n < limit else 0.0
            for w, limit, n in zip(phase.weights, limits, given)
        )
        if (phase.start, alive) != shares:
            shares, began, first = (phase.start, alive), list(given), position
        assert alive[source] > 0.0
        assert own == given[source]
        given[source] += 1
        for k, weight in enumerate(alive):
            fair = weight / sum(alive) * (position + 1 - first)
            assert abs(given[k] - began[k] - fair) <= len(limits), (position, k)
        if position % 97 == 0:
            assert mixture.counts(position + 1) == given
    if mixture.end is not None:
        weights = [p for p in phases if p.start <= mixture.end][-1].weights
        assert all(
            g == limit for g, limit, w in zip(given, limits, weights) if w and limit is not None
        )
        with rejects("instances", (mixture.end, mixture.end), "range"):
            mixture.locate(np.array([mixture.end]))


def test_counts_of_many_blocks_are_the_shares_to_one_sample():
    weights = (0.7, 0.2, 0.0999, 0.0001)
    mixture = Mixture([Phase(0, weights)], [None] * 4)
    for position in (10**4, 10**6, 10**9, 10**15):
        block = position // 2**15 * 2**15
        shares = [w / sum(weights) * block for w in weights]
        error = [abs(a - b) for a, b in zip(mixture.counts(block), shares)]
        # shares are multiples of 2^-30
        assert max(error) <= 1 + block / 2**30, (position, error)


def test_a_far_sample_costs_no_more_than_a_near_one():
    mixture = Mixture([Phase(0, (5.0, 3.0, 1.0)), Phase(10**9, (1.0, 1.0, 1.0))], [None] * 3)
    mixture.locate(np.arange(10))
    ids = np.arange(10**12, 10**12 + 64)
    orders = _order.cache_info().misses
    sources, own = mixture.locate(ids)
    assert _order.cache_info().misses - orders <= 2, "blocks that were made"
    assert own.min() > 10**11
    assert sorted(np.bincount(sources).tolist()) == [21, 21, 22]


def test_equal_weights_alternate():
    sources, own = Mixture([Phase(0, (1.0, 1.0))], [None, None]).locate(np.arange(8))
    assert sources.tolist() == [0, 1] * 4
    assert own.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        ([Phase(1, (1.0,))], ("phases", [1], "order")),
        ([Phase(0, (1.0,)), Phase(0, (1.0,))], ("phases", [0, 0], "order")),
        ([Phase(0, (1.0, 1.0))], ("weights", (1.0, 1.0), "range")),
        ([Phase(0, (-1.0,))], ("weights", (-1.0,), "range")),
        ([Phase(0, (0.0,))], ("weights", (0.0,), "range")),
        ([Phase(0, (float("nan"),))], ("weights", (float("nan"),), "range")),
    ],
)
def test_invalid_mixtures_are_rejected(phases, problem):
    with rejects(*problem):
        Mixture(phases, [None])


def test_F174_a_tiny_share_is_rejected_by_the_name_of_its_source():
    for weight in (1e-9, 0.9 * 2**-19, sys.float_info.min):
        with rejects("sources.b.weight", weight, "range"):
            Mixture([Phase(0, (1.0, weight))], [None, None], ["a", "b"])
        with rejects("phases.late.weights.a", weight, "range"):
            phases = [Phase(0, (1.0, 1.0)), Phase(9, (weight, 1.0), "late")]
            Mixture(phases, [None, None], ["a", "b"])
    Mixture([Phase(0, (1.0, 2**-19 + 2**-29))], [None, None], ["a", "b"])
    assert sum(integer_shares((0.1,) * 7)) == 2**30


@pytest.mark.parametrize("scale", [5e-324, 1e-200, 1.0, 1e200, 1e307])
def test_F174_shares_do_not_depend_on_the_size_of_weights(scale):
    weights = [3.0 * scale, 2.0 * scale, 9.0 * scale]
    exact = [Fraction(weight) for weight in weights]
    edges = [round(sum(exact[:n]) / sum(exact) * 2**30) for n in range(4)]
    assert integer_shares(weights) == tuple(b - a for a, b in pairwise(edges))
    assert integer_shares((1e308, 1e308)) == (2**29, 2**29)
