"""Wrapper subclasses, such as torchao's float8 weights, and the plain tensors that they hold."""

import torch
from torch.distributed.tensor import DTensor
from torch.masked import MaskedTensor

from forge_ckpt._shared.problems import Problem, invalid

# Inner tensors that are recomputed from the values; they are not saved, and stale after a load.
_DERIVED = {"_precomputed_scale"}


def layout_problem(name: str, tensor: torch.Tensor) -> Problem | None:
    """The problem of a tensor whose bytes are not those of its elements, one after the other."""
    masked = isinstance(tensor, MaskedTensor)
    layout = "masked" if masked else "nested" if tensor.is_nested else tensor.layout
    if layout == torch.strided:
        return None
    rule = f"is the layout of a tensor of {tensor.dtype}, and must be dense"
    return Problem(name, "dense", layout, rule, "densify it")


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's bytes: of a DTensor its shard, of a wrapper its inner tensor.

    A wrapper (``__tensor_flatten__``) owns no memory: its ``data_ptr()`` is 0. Raises ValueError
    unless it holds one tensor of its own shape and dtype.
    """
    if isinstance(tensor, DTensor):
        return unwrap(tensor.to_local())
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    if hasattr(tensor, "trigger_wait"):  # the result of a collective that is still running
        return unwrap(tensor.trigger_wait())
    names = [name for name in tensor.__tensor_flatten__()[0] if name not in _DERIVED]
    inner = getattr(tensor, names[0])
    if len(names) > 1 or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype):
        rule = f"holds {', '.join(names)}, and not one tensor of its own shape and dtype"
        fix = "save the plain tensors inside it"
        raise invalid("", "subclass", type(tensor).__name__, rule, fix)
    return unwrap(inner.detach())
