"""Devices, precision and layouts over many ranks for PyTorch models."""

from functools import partial

from forge_parallel._renamed import renamed
from forge_parallel.axes.fsdp import accumulate, apply_fsdp, follow_requires_grad, reshard
from forge_parallel.config import ParallelConfig
from forge_parallel.grad_norm import clip_grad_norm_, clip_grads_, global_count, global_grad_norm
from forge_parallel.meshes import Axis, Meshes, config_of_mesh, launch, make_meshes, select_device
from forge_parallel.parallelize import materialize, parallelize, store_parameters
from forge_parallel.start import (
    StartError,
    World,
    end_process_group,
    find_world,
    leave,
    start_process_group,
)

__all__ = [
    "Axis",
    "Meshes",
    "ParallelConfig",
    "StartError",
    "World",
    "accumulate",
    "apply_fsdp",
    "clip_grad_norm_",
    "clip_grads_",
    "config_of_mesh",
    "end_process_group",
    "find_world",
    "follow_requires_grad",
    "global_count",
    "global_grad_norm",
    "launch",
    "leave",
    "make_meshes",
    "materialize",
    "parallelize",
    "reshard",
    "select_device",
    "start_process_group",
    "store_parameters",
]

__getattr__ = partial(renamed, __name__)
