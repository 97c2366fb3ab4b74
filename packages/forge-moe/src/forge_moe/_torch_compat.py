"""Private or new torch names in use, each with the versions that have it."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

grouped_mm: Callable[..., Tensor] | None
grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""`F.grouped_mm` (public in torch 2.13), else `torch._grouped_mm` (from 2.8 on)."""


def scaled_grouped_mm(*operands: Any, **options: Any) -> Tensor:
    """Grouped matmul of float8 rows and matrices with fp32 scales, CUDA from SM90 on (torch 2.8 to 2.15).

    Not tested: it needs a GPU with the kernel.
    """
    return torch._scaled_grouped_mm(*operands, **options)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """x (n, ...) of all ranks, concatenated on dim 0; torch 2.13 renamed the collective."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    out = x.new_empty(x.size(0) * dist.get_world_size(group), *x.shape[1:])
    gather(out, x.contiguous(), group=group)
    return out


def is_clamped(x: Tensor, limit: float) -> Tensor:
    """Where `x.clamp(max=limit)` has no gradient: above the limit, and from torch 2.14 on at the limit, too."""
    return x > limit if torch.__version__ < "2.14" else x >= limit


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of `x`, or None; None on meta, which autocast does not know."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def inside_backward() -> bool:
    """Whether this thread runs inside the autograd engine, as a recomputation does (torch 2.11 to 2.15)."""
    if torch.compiler.is_dynamo_compiling():
        # A graph cannot hold the check; with fullgraph=True the compiler raises with this message.
        torch._dynamo.graph_break(msg=_NEEDS_GRAPH_BREAK)
    return torch._C._current_graph_task_id() != -1


_NEEDS_GRAPH_BREAK = (
    "a forge_moe layer checks in each call with gradients whether it is a recomputation, which must not count "
    "twice; compile it without fullgraph = True, or run it under torch.no_grad()"
)


def is_compiling_or_fake(x: Tensor) -> bool:
    """Whether `x` has no values: on meta, a fake tensor, or under torch.compile."""
    return x.is_meta or torch.compiler.is_compiling() or is_fake(x)


def is_fake(x: Tensor) -> bool:
    """Whether `x` is a FakeTensor; does not import the module of fake tensors."""
    module: Any = sys.modules.get("torch._subclasses.fake_tensor")  # private, torch 2.0 to 2.15
    return module is not None and isinstance(x, module.FakeTensor)
