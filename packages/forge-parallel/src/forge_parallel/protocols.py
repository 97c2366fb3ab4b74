"""Methods and attributes of your own models and batches that forge_parallel reads; there is nothing to subclass.

What a model or a module may define besides its forward is in `ModuleSharding`, `ModuleInputs`, `ModuleCost` and
`ModuleForward`, one for each subject, in all packages alike. All are optional for data parallelism; another axis that
needs a missing one raises an error with its name. `parallelize` finds misspelled names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from forge_parallel._renamed import renamed
from forge_parallel._shared.module_protocols import (
    Attend,
    ModuleCost,
    ModuleForward,
    ModuleInputs,
    ModuleSharding,
)

__all__ = [
    "Attend",
    "BatchLike",
    "CachingContext",
    "ModuleCost",
    "ModuleForward",
    "ModuleInputs",
    "ModuleSharding",
]

V = TypeVar("V")


class CachingContext(Protocol):
    """A context that computes a value once per forward rather than once per layer; optional."""

    def once(self, key: Any, make: Callable[[], V], /) -> V:
        """`make()`, or the value that an earlier call with this key computed."""
        ...


class BatchLike(Protocol):
    """Sequences that a data rank reads, for `Compute` (forge_data's `Batch`): dim 0 is that of sequences, the last one of
    tokens.

    Labels are shifted already and -100 if a token has no label; weights multiply the losses of labels. Further
    fields (positions, document_ids) are given to the model by name.
    """

    @property
    def tokens(self) -> Tensor:
        """(B, S) int64."""
        ...

    @property
    def labels(self) -> Tensor:
        """(B, S) int64."""
        ...

    @property
    def weights(self) -> Tensor | None:
        """(B, S) fp32; None for ones."""
        ...

    @property
    def extras(self) -> Mapping[str, Any]:
        """Further inputs by name, of B sequences each."""
        ...

    def split(self, micro_batch: int, /) -> Sequence[BatchLike]:
        """Batches of `micro_batch` sequences, in order."""
        ...

    def to(self, device: torch.device, stay: Sequence[str] = ()) -> BatchLike:
        """The batch on a device, but for the fields and extras named in `stay`."""
        ...


__getattr__ = partial(renamed, __name__)
