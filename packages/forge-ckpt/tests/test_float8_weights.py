"""Weights that torchao wraps for its float8 all-gather are saved and loaded like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forge_ckpt import Store
from forge_testing import run_on_ranks

pytestmark = pytest.mark.lane("test")

pytest.importorskip("torchao")


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two converted layers, sharded on ranks of many (gloo cannot gather float8: no forward there)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def held(value: Any) -> torch.Tensor:
    """Bytes of this rank's part."""
    local = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
    return getattr(local, "_tensor", local)


def save_and_load(root: str) -> list[bool]:
    model, optimizer = build(0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) + 1
    optimizer.step()
    other, fresh = build(1)
    with Store(root) as store:
        store.save(1, {"model": model, "optimizer": optimizer})
        assert store.load({"model": other, "optimizer": fresh}) == 1
    same = []
    for one, two in zip(model.parameters(), other.parameters()):
        same.append(torch.equal(held(one), held(two)))
        for name, slot in optimizer.state[one].items():
            same.append(torch.equal(held(slot), held(fresh.state[two][name])))
            assert type(held(slot)) is torch.Tensor
    return same


def test_F115_float8_weights_of_one_process(tmp_path: Any) -> None:
    assert save_and_load(str(tmp_path)) == [True] * 8


@pytest.mark.slow
@pytest.mark.distributed
def test_F115_float8_weights_sharded_on_two_ranks(tmp_path: Any) -> None:
    assert run_on_ranks(2, save_and_load, str(tmp_path)) == [[True] * 8] * 2
