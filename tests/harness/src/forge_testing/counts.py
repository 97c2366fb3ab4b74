"""Counts of what would wait for an accelerator, and of collectives: of a block of code, and of each hook of a run.

Host syncs are counted as what on a GPU would wait for it: reads of values (`.item()`, `float(tensor)`,
`if tensor`, `.tolist()`, `.cpu()`, `.numpy()`) and results whose size depends on values.
"""

from __future__ import annotations

import contextlib
import sys
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_train import Extension, Trainer

# Readers of what is on the host in any case, by module or function.
HOST_READERS = (
    "forge_data.loader",  # rows come as numpy arrays
    "forge_data.packing",
    "forge_resilience.agreement",  # votes are exchanged between hosts
    "document_lengths",  # forge_core splits sequences at documents; on an accelerator one copy, as documented
    "documents",  # context parallelism plans by ids that lie on the host
    "forge_data.batch",  # counts a batch's labels as it makes it
    "forge_parallel.host_copy",  # what was copied a step before
    "count_tokens",  # a batch that was copied to the device is still on the host
    "columns",  # the same numbers, of mixtures
    "_not_padding",  # forge_core looks for padding on a CPU only
)


# On an accelerator the host would wait: for a value, or for the size of a result.
_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}
_READERS = ("tolist", "cpu", "numpy")  # no operator on a CPU, so they are watched by name


class Counts(TorchDispatchMode):
    """Counts what would wait for an accelerator, outside HOST_READERS, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.collectives = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Counts:
        for name in _READERS:
            original = getattr(torch.Tensor, name)
            self._patches.enter_context(
                unittest.mock.patch.object(torch.Tensor, name, self._counted(original))
            )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _counted(self, original: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.reads += not _of_the_host()
            return original(tensor, *args, **options)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = func in _WAITING
        self.reads += read and not _of_the_host()
        self.collectives += func.namespace == "c10d" or (
            func.namespace == "_c10d_functional" and "wait" not in str(func)
        )
        return func(*args, **(kwargs or {}))


def _of_the_host() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if {frame.f_globals.get("__name__"), frame.f_code.co_name} & {*HOST_READERS}:
            return True
        frame = frame.f_back
    return False


class Allowed(NamedTuple):
    """What a hook may do, as the table in the docstring of Extension says: yes, no, or if due."""

    collectives: str
    waits: str


def allowed_by_hook() -> dict[str, Allowed]:
    """The table of hooks."""
    found: dict[str, Allowed] = {}
    for line in (Extension.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and set(cells[2:4]) <= {"yes", "no", "if due"}:
            found |= dict.fromkeys(cells[0].split(", "), Allowed(cells[2], cells[3]))
    return found


class HookCounts:
    """Counts collectives and host syncs in each hook of a trainer's extensions, from its construction on.

    `collectives` and `waits` have an entry for each (hook, extension) that was called.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        for extension in trainer.run.extensions:
            for hook in allowed_by_hook():
                setattr(extension, hook, self._counted(getattr(extension, hook), hook, extension))

    def _counted(self, function: Callable[..., Any], hook: str, extension: Extension) -> Any:
        key = hook, type(extension).__name__

        def call(*args: Any) -> Any:
            with self._counting(key):
                found = function(*args)
            is_context = isinstance(found, AbstractContextManager) and hook.startswith("around_")
            return self._around(found, key) if is_context else found

        return call

    @contextlib.contextmanager
    def _around(self, inner: AbstractContextManager[Any], key: tuple[str, str]) -> Iterator[None]:
        """Count in what a context manager does at its begin and end, and not in between."""
        with self._counting(key):
            inner.__enter__()
        try:
            yield
        finally:
            with self._counting(key):
                inner.__exit__(*sys.exc_info())

    @contextlib.contextmanager
    def _counting(self, key: tuple[str, str]) -> Iterator[None]:
        with Counts() as counts:
            yield
        self.collectives[key] += counts.collectives
        self.waits[key] += counts.reads


def bytes_kept(model: torch.nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes of the tensors that autograd keeps of a forward, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*args, **kwargs)
    return sum(t.untyped_storage().nbytes() for t in saved.values())
