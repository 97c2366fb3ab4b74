"""A DeviceMesh and a plan of torch's styles: the groups, weights and gradients of the same config and roles."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from forge_parallel import ParallelConfig, config_of_mesh, make_meshes, parallelize
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

PLAN = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
ROLES = {"norm.*": "opaque", "mlp.0.*": "colwise", "mlp.2.*": "rowwise"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), mlp=mlp))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    x = torch.arange(64.0, device=device()).view(2, 4, 8)
    model(x).square().sum().backward()
    found: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def worker() -> None:
    kind = device().type
    fp32: Any = ParallelConfig(precision="fp32", sequence_parallel=False)
    tp = init_device_mesh(kind, (2,), mesh_dim_names=("tp",))
    config = config_of_mesh(tp, fp32)
    assert (config.tp, config.dp_shard, config.device) == (2, 1, kind)
    ours = parallelize(net(), fp32, mesh=tp, plan=PLAN)
    wanted = parallelize(net(), config, make_meshes(config), roles=ROLES)
    assert tuple(ours.get_parameter("mlp.0.weight").to_local().shape) == (8, 8)  # type: ignore[operator]
    found = gradients(ours)
    assert all(torch.equal(found[n], g) for n, g in gradients(wanted).items())

    data = init_device_mesh(kind, (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    meshes = make_meshes(fp32, mesh=data)
    assert meshes.dense.get_group("dp_shard") is data.get_group("dp_shard")
    assert (meshes.batch_rank, meshes.batch_size) == (dist.get_rank(), 2)
    named = init_device_mesh(kind, (2,), mesh_dim_names=("dp",))
    assert make_meshes(fp32, mesh=named).dense.mesh_dim_names == ("dp_shard",)

    with rejects("mesh.mesh_dim_names", ("tp", "dp"), "names"):
        config_of_mesh(init_device_mesh(kind, (2, 1), mesh_dim_names=("tp", "dp")))
    with rejects("tp", 4, "mesh"):
        config_of_mesh(tp, ParallelConfig(tp=4))
    with rejects("mesh.mesh", [dist.get_rank()], "ranks"):
        config_of_mesh(init_device_mesh(kind, (1, 2), mesh_dim_names=("dp", "tp"))["dp"])
    with rejects("mesh", ..., "excludes"):
        parallelize(net(), fp32, meshes, mesh=data)
    with rejects("mlp.0", "ColwiseParallel", "layouts"):
        layouts = ColwiseParallel(use_local_output=False)
        parallelize(net(), fp32, mesh=tp, plan={**PLAN, "mlp.0": layouts})
    with rejects("4", ..., "not_found"):
        parallelize(net(), fp32, mesh=tp, plan={**PLAN, "4": ColwiseParallel()})


def test_a_mesh_and_a_plan_are_a_config_and_roles() -> None:
    run_on_ranks(2, worker)
