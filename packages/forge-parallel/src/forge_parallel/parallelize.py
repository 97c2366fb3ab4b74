"""From a model's description to a model that trains: the order of the steps is the order of the code."""

from __future__ import annotations

import torch
from torch import nn

from forge_parallel.axes.fsdp import apply_fsdp
from forge_parallel.config import ParallelConfig
from forge_parallel.meshes import Meshes, make_meshes

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parallelize(
    model: nn.Module, config: ParallelConfig | None = None, meshes: Meshes | None = None
) -> nn.Module:
    """Bring `model` (plain, or on the meta device) to its ranks, device and precision; same object.

        with launch(config) as meshes:
            model = parallelize(model_on_meta, config, meshes)
            initialise(model, seed=0)             # storage of a meta model is not initialised yet

    `meshes` are by default those of the running process group, or of one process. One process in fp32
    wraps nothing; anything else is FSDP2, with its mixed precision in bf16. `model.blocks()`, where
    offered, names the modules that are wrapped one by one. A model with values must have the same
    values on all ranks: each keeps its shard of them, nothing is sent.

    Cost: memory as `materialise`; one collective to make the mesh if `meshes` is not given.
    """
    config = ParallelConfig() if config is None else config
    meshes = make_meshes(config) if meshes is None else meshes
    if meshes.dense is not None:
        # before materialising: a sharded parameter then allocates its shard alone
        apply_fsdp(
            model,
            meshes.dense,
            compute_dtype=_DTYPES[config.precision],
            reduce_dtype=_DTYPES[config.reduce_dtype],
            reshard_after_forward=config.reshard_after_forward,
            cpu_offload=config.cpu_offload,
            sparse=meshes.sparse,
        )
    parameters = torch.device("cpu") if config.cpu_offload else meshes.device
    return materialise(model, meshes.device, parameters)


def materialise(
    model: nn.Module, device: torch.device, parameter_device: torch.device | None = None
) -> nn.Module:
    """Move to `device`; what is on the meta device gets storage there, with arbitrary content.

    `parameter_device` is another place for the parameters (the host, with CPU offload). What has
    values keeps them, and a parameter under several names stays one parameter.
    """
    place = device if parameter_device is None else parameter_device
    parameters = {id(p) for p in model.parameters()}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        to = place if id(tensor) in parameters else device
        return torch.empty_like(tensor, device=to) if tensor.is_meta else tensor.to(to)

    # Leaving the meta device makes a new Parameter for each name, which would untie shared ones.
    meta = any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    shared = _names_of_shared_parameters(model) if meta else []
    model._apply(move)
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
