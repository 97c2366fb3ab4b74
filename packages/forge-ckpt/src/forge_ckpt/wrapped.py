"""Tensors that hold another tensor, as torchao's float8 weights do, seen as what they hold."""

import torch
from torch.distributed.tensor import DTensor

# Inner tensors that are computed anew from the values: not saved, stale after a load.
_DERIVED = {"_precomputed_scale"}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the bytes of a wrapper subclass; ``tensor`` itself where it is none.

    A wrapper (``__tensor_flatten__``) has no memory of its own: its ``data_ptr()`` is 0. Raises
    ValueError unless it holds one tensor, of its own shape and dtype.
    """
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    if hasattr(tensor, "trigger_wait"):  # a collective's result that has not come yet
        return plain(tensor.trigger_wait())
    names = [name for name in tensor.__tensor_flatten__()[0] if name not in _DERIVED]
    inner = getattr(tensor, names[0])
    if len(names) > 1 or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(
            f"tensor subclass {type(tensor).__name__} holds {', '.join(names)}, and not one tensor of "
            "its own shape and dtype; save the plain tensors inside it"
        )
    return plain(inner.detach())
