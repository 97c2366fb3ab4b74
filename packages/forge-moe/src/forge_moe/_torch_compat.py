"""Private or new torch names in use, each with the versions it was seen in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _find_grouped_mm() -> Callable[..., Tensor] | None:
    """`F.grouped_mm` (public in torch 2.13), else `torch._grouped_mm` (from 2.8 on)."""
    public: Any = getattr(torch.nn.functional, "grouped_mm", None)
    return public if public is not None else getattr(torch, "_grouped_mm", None)


grouped_mm = _find_grouped_mm()


def scaled_grouped_mm(*operands: Any, **options: Any) -> Tensor:
    """Grouped product of float8 rows and matrices with fp32 scales, CUDA from SM90 on (torch 2.8 to 2.13).

    Not run by us: no machine with the kernel was at hand.
    """
    return torch._scaled_grouped_mm(*operands, **options)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """x (n, ...) of all ranks one after another on dim 0; torch 2.13 has a new name for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    out = x.new_empty(x.size(0) * dist.get_world_size(group), *x.shape[1:])
    gather(out, x.contiguous(), group=group)
    return out


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for where `x` lies, or None; meta, which it does not know, included."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off where `x` lies."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def inside_backward() -> bool:
    """Whether this thread runs inside the autograd engine, as a recomputation does (torch 2.11 to 2.13)."""
    if torch.compiler.is_dynamo_compiling():
        # No graph can hold the question; with fullgraph=True the compiler ends with this sentence.
        torch._dynamo.graph_break(msg=_ASKS)
    return torch._C._current_graph_task_id() != -1


_ASKS = (
    "a forge_moe layer asks at each call with gradients whether it is a recomputation, which must not count "
    "twice; compile it without fullgraph = True, or run it under torch.no_grad()"
)


def is_compiling_or_fake(x: Tensor) -> bool:
    """Whether `x` holds no values now: on meta, a fake tensor, or under torch.compile."""
    return x.is_meta or torch.compiler.is_compiling() or is_fake(x)


def is_fake(x: Tensor) -> bool:
    """Whether `x` is a FakeTensor; the module is looked up only if somebody has loaded it."""
    import sys

    module: Any = sys.modules.get("torch._subclasses.fake_tensor")  # private, torch 2.0 to 2.13
    return module is not None and isinstance(x, module.FakeTensor)
