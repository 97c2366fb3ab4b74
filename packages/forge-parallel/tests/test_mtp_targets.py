"""Tokens, labels and weights of multi-token prediction against loops over rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forge_parallel.compute import mtp_targets

pytestmark = pytest.mark.lane("test")

B, S, K = 3, 9, 4


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_each_depth_equals_a_loop(packed: bool, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(1, 90, (2, B, S), generator=generator)
    labels[:, ::4] = -100
    weights = torch.rand(B, S, generator=generator) if weighted else None
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0, 0], [5] * 9, [0, 1, 2, 3, 4, 4, 4, 4, 4]])
    batch = SimpleNamespace(
        tokens=tokens, labels=labels, weights=weights, document_ids=ids if packed else None
    )
    inputs, targets = mtp_targets(batch, K)
    assert inputs.shape == (B, K, S)
    assert len(targets) == 2 * K
    for row in range(B):
        for depth in range(1, K + 1):
            of_depth = targets[2 * depth - 2 : 2 * depth]
            for place in range(S):
                later = place + depth
                inside = later < S
                token = tokens[row, later] if inside else 0
                assert inputs[row, depth - 1, place] == token
                passed = ids[row, place : later + 1] if packed and inside else ids[row, :1]
                same = inside and (passed == passed[0]).all()  # an id may come again
                assert of_depth[0][row, place] == (labels[row, later] if same else -100)
                if weighted and same:
                    assert of_depth[1][row, place] == weights[row, later]
    assert weighted or targets[1::2] == (None,) * K
