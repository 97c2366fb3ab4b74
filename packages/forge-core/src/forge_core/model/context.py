"""Tensors about the tokens of a batch, for token mixers and feed-forwards.

Shapes: B sequences, S tokens of a sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from forge_core.model.attention_ops import AttentionSpec, SegmentPlan, document_starts

T = TypeVar("T")


class _Derived:
    """A mapping that is no pytree, so FSDP2 neither copies nor casts its content.

    FSDP2 rebuilds dataclass arguments of each wrapped block with `dataclasses.replace` and casts the
    tensors inside, also in dicts. It passes on an object of an unknown class: the blocks still
    share it, and rotary tables stay fp32.
    """

    def __init__(self, sources: Sequence[Any] = ()) -> None:
        self.values: dict[Any, Any] = {}
        self.sources = sources


class TokenMask(Protocol):
    """Mask of a batch (who sees whom); made once per forward, and no dataclass, so that FSDP2 passes it on."""

    def prepare(self, spec: AttentionSpec, x: Tensor) -> None:
        """Compute what `attend` reads for a spec and the device of x, before the first block.

        ValueError for a spec that it does not compute.
        """
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """Attend under this mask: q (B, S, H, D), k and v (B, S, K, D), sinks (H,) -> like q.

        Values may be narrower (latent attention): v (B, S, K, V) -> (B, S, H, V).
        """
        ...


@dataclass(frozen=True)
class TokenContext:
    """Plain tensors about a batch of tokens, all optional; one object serves all blocks of a forward.

    token_ids: (B, S) int64. valid: (B, S) bool, False on padding. document_ids: (B, S) int, equal and adjacent = one
    document, negative = padding. modality_ids: (B, S) int, 0 text, -1 padding, others by the model's modalities.
    positions: (B or 1, S) int64, or (B, 3, S) with `mrope`. media: input of cross-attention, of any structure. mask: a
    `TokenMask` in place of causal attention inside of documents.

    Values that blocks derive from these (rotary tables, segment plans) are computed at the first request
    and stored with the context, so they cost once per forward and not once per layer.
    """

    token_ids: Tensor | None = None
    valid: Tensor | None = None
    document_ids: Tensor | None = None
    modality_ids: Tensor | None = None
    positions: Tensor | None = None
    media: Any = None
    mask: TokenMask | None = None
    _derived: _Derived = field(default_factory=_Derived, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A context rebuilt around the same tensors shares; one with other tensors starts anew.
        given = [getattr(self, f.name) for f in fields(self) if f.name != "_derived"]
        current = _leaves(given)
        sources = self._derived.sources
        if len(sources) != len(current) or any(a is not b for a, b in zip(current, sources)):
            object.__setattr__(self, "_derived", _Derived(current))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value of `make()`, computed by the first caller that gives this key."""
        values = self._derived.values
        if key not in values:
            values[key] = make()
        return values[key]

    def segments(self) -> SegmentPlan | None:
        """Return the plan of the documents, whose lengths are on the host; None without document_ids.

        Costs one device-to-host copy per forward if document_ids are on an accelerator; keep
        them on the CPU to save it.
        """
        ids = self.document_ids
        if ids is None:
            return None
        return self.once("segments", lambda: SegmentPlan.of(ids))


def _leaves(value: Any) -> list[Any]:
    """Flatten the containers that FSDP2 rebuilds: dataclasses, dicts, lists and tuples."""
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, dict):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)]


def default_positions(
    size: int,
    document_ids: Tensor | None,
    device: torch.device,
    past: int = 0,
    first: Sequence[int] | None = None,
) -> Tensor:
    """Return positions (B or 1, S) int64 that count from 0 in each document; no host sync.

    past: tokens in a cache. first: per sequence, the index at which the document of the first new token began
    (`past` for a new one).
    """
    index = torch.arange(past, past + size, device=device).unsqueeze(
        0
    )  # (1, S), from the start of the cache
    if document_ids is None and not any(first or ()):
        return index
    # from the host without a wait, unlike torch.tensor(..., device=device)
    starts = torch.tensor([past] if first is None else list(first))
    begin = starts.to(device, non_blocking=True).unsqueeze(1)
    if document_ids is None:
        return index - begin
    ids = document_ids.to(device, non_blocking=True)
    # a document begins at the newest start so far; the first token's may be in the cache
    later = torch.where(document_starts(ids), index, 0)[:, 1:]  # (B, S - 1), 0 inside of a document
    begins = torch.cat((begin.expand(ids.size(0), 1), later), dim=1).cummax(dim=1).values
    return index - begins
