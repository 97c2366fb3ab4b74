"""Device, precision and parallel layouts for PyTorch models."""

from forge_parallel.config import CAPABILITIES, ParallelConfig
from forge_parallel.device import select_device
from forge_parallel.grad_norm import clip_grad_norm_
from forge_parallel.parallelize import apply_fsdp, materialise, parallelize
from forge_parallel.process_group import one_rank_mesh, shutdown

__all__ = [
    "CAPABILITIES",
    "ParallelConfig",
    "apply_fsdp",
    "clip_grad_norm_",
    "materialise",
    "one_rank_mesh",
    "parallelize",
    "select_device",
    "shutdown",
]
