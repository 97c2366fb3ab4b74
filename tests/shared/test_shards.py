"""Parts of tensors on this rank: a plain tensor is its own part. Ranks are in forge-core's tests of rounding and init."""

from __future__ import annotations

import pytest
import torch

from forge_core._shared.shards import local_indices, local_tensor, shard_like

pytestmark = pytest.mark.lane("test")


def test_a_plain_tensor_is_its_own_part() -> None:
    full = torch.arange(6.0).view(2, 3)
    target = torch.zeros(2, 3)
    assert local_tensor(full) is full
    assert shard_like(full, target) is full
    assert local_indices(target, 1).tolist() == [0, 1, 2]
