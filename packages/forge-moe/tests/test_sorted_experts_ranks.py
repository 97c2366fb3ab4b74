"""Experts of a router of one's own: rows sorted by expert, on one rank and over several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_moe import Experts, MoEConfig, SortedExperts, expert_parallelize
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
CONFIG = MoEConfig(dim=8, hidden_dim=12, num_experts=4, bias=True)
#: Rows of each expert on each rank: uneven, and on the last rank none at all.
COUNTS = ((3, 0, 2, 1), (0, 4, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1))


def built(kind: type[Experts]) -> Experts:
    torch.manual_seed(0)
    experts = kind(CONFIG)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(device())


def rows_of(rank: int) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(COUNTS[rank])
    rows = torch.randn(sum(COUNTS[rank]), 8, generator=torch.Generator().manual_seed(rank))
    return rows.to(device()).requires_grad_(), counts.to(device())


def by_hand(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    experts = built(Experts)
    out = experts(rows, counts)
    out.square().sum().backward()
    assert rows.grad is not None
    return out, rows.grad, {n: p.grad for n, p in experts.named_parameters() if p.grad is not None}


def on_rank() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts = expert_parallelize(built(SortedExperts), mesh)
    rows, counts = rows_of(dist.get_rank())
    out = experts(rows, counts)
    out.square().sum().backward()
    assert rows.grad is not None
    grads: dict[str, Any] = {n: p.grad for n, p in experts.named_parameters()}
    return out.detach(), rows.grad, {n: g.full_tensor() for n, g in grads.items()}


def test_on_one_rank_they_equal_experts():
    rows, counts = rows_of(0)
    assert torch.equal(built(SortedExperts)(rows, counts), built(Experts)(rows, counts))


@pytest.mark.parametrize("world", [2, 4])
def test_over_ranks_each_row_meets_its_expert(world):
    wanted: dict[str, Tensor] = {}
    found = run_on_ranks(world, on_rank)
    for rank, (out, grad, _) in enumerate(found):
        own, own_grad, weights = by_hand(*rows_of(rank))
        assert torch.allclose(out, own, rtol=0, atol=1e-6), rank
        assert torch.allclose(grad, own_grad, rtol=0, atol=1e-5), rank
        for name, value in weights.items():
            wanted[name] = wanted.get(name, torch.zeros_like(value)) + value
    for _, _, grads in found:
        assert grads.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (grads[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_experts_that_ranks_cannot_share_evenly_are_rejected():
    run_on_ranks(3, refused)


def refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device().type, (3,), mesh_dim_names=("ep",))
    with rejects("num_experts", 4, "divides", where="experts"):
        expert_parallelize(torch.nn.ModuleDict({"experts": built(SortedExperts)}), mesh)


def float8_steps(reshards: bool | None) -> list[Tensor]:
    """Outputs of two micro-batches in each of three steps; a change of the shards is one of the weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    experts: Any = Experts(replace(CONFIG, backend="float8")).to(device())
    if reshards is not None:
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        fully_shard(experts, mesh=mesh, reshard_after_forward=reshards)
        experts.set_gradient_divide_factor(1.0)
        experts.set_force_sum_reduction_for_comms(True)
    optimizer, outputs = torch.optim.SGD(experts.parameters(), lr=0.1), []
    rows, counts = rows_of(0)
    for _ in range(3):
        for _ in range(2):
            out = experts(rows, counts)
            out.sum().backward()
            outputs.append(out.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def test_gathered_parameters_are_cast_after_each_change_of_their_shards() -> None:
    (wanted,) = run_on_ranks(1, float8_steps, None)
    assert not torch.equal(wanted[0], wanted[2])
    for reshards in (True, False):
        (found,) = run_on_ranks(1, float8_steps, reshards)
        assert all(map(torch.equal, found, wanted))
