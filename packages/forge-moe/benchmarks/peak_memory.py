"""How much memory a step takes at most, also where the device keeps no count."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Alive(TorchDispatchMode):
    """Bytes of storages made since it was entered that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is not Tensor:
                continue
            storage = tensor.untyped_storage()
            if storage not in given and storage not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _gone(self, size: int) -> None:
        self.now -= size


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Most bytes alive at once of what `step` makes; kernels' own scratch memory shows only on a GPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _Alive() as alive:
        step()
    return alive.most
