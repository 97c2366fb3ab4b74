"""Rows of samples hold each sample once, and no row is longer than asked."""

import numpy as np
import pytest

from forge_vlm.data import packing

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize("window", [4, 7, 4096])
def test_F197_each_sample_is_in_one_row(window, monkeypatch):
    monkeypatch.setattr(packing, "_WINDOW", window)
    lengths = np.random.default_rng(0).integers(1, 33, 50)
    rows = packing.plan_rows(lengths, 32, True)
    assert sorted(np.concatenate(rows).tolist()) == list(range(50))
    assert max(lengths[row].sum() for row in rows) <= 32
    assert {tuple(row // window) for row in rows if len(set(row // window)) > 1} == set()
    assert len(rows) <= 2 * lengths.sum() / 32 + -(-50 // window)  # first fit and its relatives
    assert [row.tolist() for row in packing.plan_rows(lengths, 32, False)] == [
        [i] for i in range(50)
    ]
