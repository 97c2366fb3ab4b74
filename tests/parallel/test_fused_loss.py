"""A loss inside the head's forward, where the weight is sharded over ranks, equals the loss of one process.

Bound: fp32 1e-5 of max|a - b| / max|b|.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forge_core
from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes import vocab_cross_entropy
from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.lane("test")

V, B, S = 48, 4, 16


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def errors(layout: dict[str, int], tied: bool) -> dict[str, float]:
    plain = forge_core.Transformer(
        forge_core.TransformerConfig(V, dim=32, num_layers=2, num_heads=4, tie_embeddings=tied)
    )
    forge_core.initialize(plain.to(device()), 1, std=0.2)
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(0)).to(
        device()
    )
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    wanted = forge_core.cross_entropy(plain(tokens), labels).sum / (B * S)
    wanted.backward()
    config = ParallelConfig(device=device().type, precision="fp32", **layout)
    meshes = make_meshes(config)
    model = parallelize(copy.deepcopy(plain), config, meshes)
    model.zero_grad()
    rows = slice(None)
    if meshes.tp.size == 1:
        rows = slice(meshes.rank * B // 2, (meshes.rank + 1) * B // 2)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        assert weight.shape == (V // meshes.tp.size, 32)
        assert type(weight) in (Tensor, torch.nn.Parameter)  # not a shard
        if meshes.tp.size > 1:
            return vocab_cross_entropy(F.linear(x, weight), labels, meshes.tp).sum
        return forge_core.fused_cross_entropy(x, weight, labels[rows]).sum

    total = model(tokens[rows], positions=None, loss=loss) / (B * S)
    total.backward()
    value = total.detach().clone()
    if meshes.tp.size == 1:
        torch.distributed.all_reduce(value)
    found = {"loss": error(value, wanted.detach())}
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        found[name] = error(full(mine.grad), theirs.grad)
    return found


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_a_loss_inside_of_the_head_equals_one_process(layout: dict[str, int], tied: bool) -> None:
    for found in run_on_ranks(2, errors, layout, tied):
        assert len(found) > 10
        assert max(found.values()) < 1e-5, found
