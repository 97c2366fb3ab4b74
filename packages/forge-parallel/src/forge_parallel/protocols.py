"""Methods and attributes that a model may define for forge_parallel; there is nothing to subclass.

All are optional for data parallelism. Another axis that needs a missing one raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "Attend",
    "BatchLike",
    "ComputesIn",
    "CountsFlops",
    "DeclaresBlocks",
    "DeclaresPipelineParts",
    "DeclaresRoles",
    "DeclaresUnits",
    "PlacesByToken",
    "ReadsOnHost",
    "ReadsTokenIds",
    "SharesDerived",
    "TakesExtras",
    "TakesMasks",
    "TakesOptionalInputs",
]

T = TypeVar("T")


class DeclaresBlocks(Protocol):
    """Modules that are sharded, recomputed and compiled one by one; else the longest list of like modules."""

    def blocks(self) -> Sequence[nn.Module]:
        """The blocks in order of depth."""
        ...


class DeclaresUnits(Protocol):
    """Optional: modules besides the blocks that are only sharded by themselves; else they are gathered with the root, for
    the full step."""

    def sharding_units(self) -> Sequence[nn.Module]:
        """Modules that all ranks call equally often (blocks of an encoder); of a stage, those that it has."""
        ...


class DeclaresPipelineParts(Protocol):
    """Needed by `pp`: children in order of depth."""

    def pipeline_parts(self) -> Mapping[str, Any]:
        """{"first": names, "blocks": name of a container, "last": names, "dim": width of the stream (optional)}.

        A name in both ends is tied. The forward must skip children that are None.
        """
        ...


class DeclaresRoles(Protocol):
    """Needed by `tp`, but for models with a `tp_plan` of transformers: one role for each parameter."""

    def parallel_roles(self) -> Mapping[str, Any]:
        """{pattern of names: role, or {"role": ..., "multiple_of": ...}}; see `forge_parallel.axes`."""
        ...


class Attend(Protocol):
    """Needed by `cp`: an attribute `attend` of every attention module, which `context_parallel` replaces.

    It declares plain causal attention: `is_causal = True`, or `spec`, a dataclass whose fields
    (except `scale` and `window`) have their defaults.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D) -> (B, S, H, D), within the documents of `ctx.document_ids`."""
        ...


class SharesDerived(Protocol):
    """Optional for the context that attention gets: a cache of values for all layers."""

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of `make()`, computed by the first caller with this key in a forward."""
        ...


class CountsFlops(Protocol):
    """Used to divide the depth over stages and to plan; else every linear layer counts by its weight."""

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of one forward for one token in sequences of `seq_len`, everything inside included."""
        ...


class ReadsOnHost(Protocol):
    """Keywords of forward that the model reads on the host; FSDP2 leaves them there."""

    @property
    def host_inputs(self) -> Sequence[str]:
        """Names of those keywords."""
        ...


class TakesExtras(Protocol):
    """Keywords of forward that are no tokens (patches, frames); the stage that declares them gets them.

    `after_embedding` among them is a function to call on the stream (B, S, D) where `cp` shards it.
    """

    @property
    def extra_inputs(self) -> Sequence[str]:
        """Names of those keywords."""
        ...


class TakesMasks(Protocol):
    """Keywords of forward, (B, S) ids of full sequences, by which tokens see each other; every stage of a pipeline gets
    those that a batch has, and `cp` raises ValueError with any. One that must be there is among the `extra_inputs` too."""

    @property
    def mask_inputs(self) -> Sequence[str]:
        """Names of those keywords, such as "branch_ids"."""
        ...


class TakesOptionalInputs(Protocol):
    """A model, or a stage of one, that takes further extras of a batch where it has them, on its device."""

    @property
    def optional_inputs(self) -> Sequence[str]:
        """Names of those keywords, such as "image_masks"."""
        ...


class ReadsTokenIds(Protocol):
    """A model whose blocks read the ids of tokens: every stage of a pipeline gets them, as keyword `token_ids`."""

    reads_token_ids: bool
    """True where they do; the ids (B, S) are this rank's shard of each sequence under `cp`."""


class PlacesByToken(Protocol):
    """Needed under `tp` with sequence parallelism by a model that puts tensors of its own at some tokens of its stream,
    after the embedding, which gives each rank its shard of the tokens."""

    token_part: Callable[[Tensor], Tensor] | None
    """None; set to the function that returns this rank's shard of a tensor (B, S, ...)."""


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


class ComputesIn(Protocol):
    """A module that computes in a dtype of its own under mixed precision (a router in fp32): FSDP2 wraps it by itself."""

    compute_dtype: torch.dtype
    forward_methods: Sequence[str]
