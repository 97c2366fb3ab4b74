"""Plans against slow and obvious ones."""

from __future__ import annotations

import time

import numpy as np
import pytest

from forge_data.packing_plan import plan_rows, plan_windows
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

POLICIES = ("first_fit", "best_fit")


def slow_window(lengths, seq_len, policy):
    """Rows of pieces (document, start, stop): each piece looks at every row."""
    rows, pieces = [], []
    for document, length in enumerate(lengths):
        full = range(0, length - length % seq_len, seq_len)
        rows += [[(document, start, start + seq_len)] for start in full]
        if length % seq_len:
            pieces.append((document, length - length % seq_len, length))
    if policy == "best_fit":
        pieces.sort(key=lambda piece: piece[1] - piece[2])
    open_rows = []  # for best_fit the longest waiting first, for first_fit in their order
    made = []
    for piece in pieces:
        size = piece[2] - piece[1]

        def room(row):
            return seq_len - sum(stop - start for _, start, stop in row)

        fits = [row for row in open_rows if room(row) >= size]
        if not fits:
            row = []
            open_rows.append(row)
            made.append(row)
        else:
            row = min(fits, key=room) if policy == "best_fit" else fits[0]
        row.append(piece)
        if policy == "best_fit":
            open_rows = [other for other in open_rows if other is not row] + [row]
    return rows + [sorted(row) for row in made]


def rows_of(plan):
    pieces = list(zip(plan.documents.tolist(), plan.starts.tolist(), plan.stops.tolist()))
    return [pieces[a:b] for a, b in zip(plan.rows[:-1], plan.rows[1:])]


def random_lengths(seed, count=60, longest=40):
    return np.random.default_rng(seed).integers(1, longest, count)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 33, 1000])
def test_a_plan_equals_the_slow_way(policy, seq_len):
    for seed in range(20):
        lengths = random_lengths(seed, count=1 + 3 * seed)
        plan = plan_rows(lengths, seq_len, policy)
        assert rows_of(plan) == slow_window(lengths.tolist(), seq_len, policy), seed


@pytest.mark.parametrize("policy", POLICIES)
def test_windows_are_planned_one_by_one(policy):
    lengths = random_lengths(3)
    whole = plan_rows(lengths, 16, policy, window=7)
    parts = list(plan_windows(lengths, 16, policy, window=7))
    assert rows_of(whole) == [row for part in parts for row in rows_of(part)]
    want = []
    for first in range(0, len(lengths), 7):
        for row in slow_window(lengths[first : first + 7].tolist(), 16, policy):
            want.append([(document + first, start, stop) for document, start, stop in row])
    assert rows_of(whole) == want


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seq_len", [1, 5, 64])
def test_each_token_is_once_and_no_row_is_over_its_length(policy, seq_len):
    lengths = random_lengths(5, count=500, longest=100)
    plan = plan_rows(lengths, seq_len, policy, window=100)
    rows = rows_of(plan)
    tokens = [(d, t) for row in rows for d, start, stop in row for t in range(start, stop)]
    assert sorted(tokens) == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    assert all(1 <= sum(b - a for _, a, b in row) <= seq_len for row in rows)
    short = {d for d, n in enumerate(lengths) if n <= seq_len}
    assert all(sum(d == found for row in rows for found, _, _ in row) == 1 for d in short)
    assert plan.num_cut == len(lengths) - len(short)
    assert plan.num_tokens == lengths.sum()
    assert plan.utilization == lengths.sum() / (len(rows) * seq_len)


def test_best_fit_fills_rows_of_long_tailed_documents():
    """Log-normal lengths, of which a fifth are longer than a row."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, np.exp(rng.normal(np.log(2048) - 0.8416, 1.0, 20_000))).astype(int)
    assert 0.19 < (lengths > 2048).mean() < 0.21
    best, first = (plan_rows(lengths, 2048, policy) for policy in ("best_fit", "first_fit"))
    assert best.utilization > 0.97
    assert best.utilization > first.utilization > 0.9


def test_a_plan_searches_no_list_of_all_rows():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, np.exp(rng.normal(6.5, 1.2, 100_000))).astype(int)
    began = time.process_time()
    plan_rows(lengths, 2048, "best_fit")
    assert time.process_time() - began < 2  # a search through all rows takes minutes


def test_no_documents_make_no_rows():
    plan = plan_rows(np.empty(0, np.int64), 8)
    assert plan.num_rows == 0
    assert plan.rows.tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([3, 0], 8), ("lengths", 0, "range")),
        (([3], 8, "worst_fit"), ("policy", "worst_fit", "unknown")),
        (([3], 0), ("seq_len", 0, "range")),
    ],
)
def test_bad_arguments_are_rejected(arguments, problem):
    with rejects(*problem):
        plan_rows(np.array(arguments[0]), *arguments[1:])
