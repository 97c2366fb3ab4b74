"""From a model's description to a model that trains: the order of the steps is the order of the code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_parallel.config import ParallelConfig
from forge_parallel.device import select_device
from forge_parallel.process_group import one_rank_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module, config: ParallelConfig | None = None, device: torch.device | None = None
) -> nn.Module:
    """Bring `model` (plain, or on the meta device) to its device and precision; returns the same object.

        model = parallelize(model_on_meta, ParallelConfig(precision="bf16"))
        initialise(model, seed=0)                 # storage of a meta model is not initialised yet

    fp32 wraps nothing. bf16 is FSDP2's mixed precision on a mesh of one rank: parameters, gradients
    and optimizer state stay fp32, forward and backward compute in bf16. `model.blocks()`, where
    offered, names the modules that are wrapped one by one.

    Cost: fp32 none; bf16 one cast of the parameters to bf16 per forward, 2 bytes per parameter while
    a step runs. Raises ValueError when a larger process group is running.
    """
    config = ParallelConfig() if config is None else config
    device = select_device(config.device) if device is None else device
    if config.precision == "bf16":
        # before materialising: a sharded parameter then allocates its shard alone
        apply_fsdp(model, one_rank_mesh(device), torch.bfloat16)
    return materialise(model, device)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> nn.Module:
    """Wrap every block and the root with FSDP2: `compute_dtype` forward and backward, fp32 reduction.

    Nothing is divided: losses are sums over the step's labels, divided once by the caller. On a mesh
    of one rank parameters are kept gathered between forward and backward, as there is no memory to
    save.
    """
    # imported late: half a second that an fp32 run does not need
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    blocks = getattr(model, "blocks", None)
    for module in [*(blocks() if callable(blocks) else ()), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=mesh.size() > 1)
        _divide_by_nothing(module)
    return model


def _divide_by_nothing(module: nn.Module) -> None:
    """Sum gradients over ranks. Both calls: the factor alone asks gloo for a reduction it lacks."""
    module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Move to `device`; a model on the meta device gets storage there, with arbitrary content."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        return model.to_empty(device=device)
    return model.to(device)
