"""Bytes that a computation holds at its largest moment, counted without a GPU."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the largest moment beyond what was there before: results whose storage is new, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            key, storage = _storage(tensor), tensor.untyped_storage()
            if key not in known | self.alive:
                self.alive.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
