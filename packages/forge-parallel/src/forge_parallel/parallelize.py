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
    of one rank parameters are kept gathered between forward and backward: resharding would save the
    bf16 copy and cost a second cast of every parameter. Float inputs of the model are cast to
    `compute_dtype`, those of a block are not: it may be given fp32 tables, such as RoPE's.
    """
    # imported late: half a second that an fp32 run does not need
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = getattr(model, "blocks", None)
    for module in [*(blocks() if callable(blocks) else ()), model]:
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=module is model,
        )
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=mesh.size() > 1)
        _divide_by_nothing(module)
    return model


def _divide_by_nothing(module: nn.Module) -> None:
    """Sum gradients over ranks. Both calls: the factor alone asks gloo for a reduction it lacks."""
    module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Move to `device`; what is on the meta device gets storage there, with arbitrary content.

    What has values keeps them, and a parameter under several names stays one parameter.
    """
    if not any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        return model.to(device)
    # Leaving the meta device makes a new Parameter for each name, which would untie shared ones.
    shared = _names_of_shared_parameters(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in shared:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    return model


def _names_of_shared_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]
