"""Bytes that operators move, and their calls: of CPU tensors, and of meta tensors, which cost nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GATHERS = {"index_select", "embedding", "gather", "index", "_embedding_bag"}


class Traffic(TorchDispatchMode):
    """Counts calls by the name of the operator, and the bytes of distinct inputs and of outputs; views move nothing.

    A gather reads at most what it writes, and its index. An operator that runs below another one is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        returns = [each.alias_info for each in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns) or "empty" in name:
            return out

        self.calls[name] += 1
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        # Outputs that are inputs, of operators in place, are written, too.
        outputs = {id(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        read, written = _size(inputs), _size(outputs)
        if name in _GATHERS:
            read = min(
                read,
                written + _size({k: t for k, t in inputs.items() if not t.is_floating_point()}),
            )
        self.bytes += read + written
        return out


def _size(tensors: dict[int, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
