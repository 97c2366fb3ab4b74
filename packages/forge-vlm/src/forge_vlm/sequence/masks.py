"""Attention masks of branches and of tokens that also attend to later ones: one predicate for each attention backend.

Shapes: B sequences, S tokens of a sequence, H query heads, K key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge_core import KVCache
from forge_core.model import AttentionSpec, attend_flex, attend_masked
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid
from forge_vlm.sequence.plan import SPAN_INPUTS, SequencePlan

__all__ = [
    "SequenceMask",
    "attend_dense",
    "attend_flex",
    "build_mask",
    "check_branches",
    "flex_mask",
    "planned_spans",
    "require_no_mask",
]


class SequenceMask:
    """Branches of documents, and tokens that see each other also ahead; a `TokenMask` of forge_core.

        mask = SequenceMask.of(None, branch_ids=torch.tensor([[0, 0, 1, 2]]), span_ids=None)
        logits = Transformer(config)(tokens, mask=mask)

    A token sees tokens of its document, of its branch or of branch 0, that stand at or before it or have its own span of
    0 or more. Padding, of negative document ids, sees itself only.

    On the CPU it is a boolean mask (B, 1, S, S) of scaled dot product attention, which is made once for all layers of one
    window; elsewhere a block mask of FlexAttention, which computes neither soft-caps nor sinks.
    """

    def __init__(self, documents: Tensor, branches: Tensor, spans: Tensor) -> None:
        self.documents, self.branches, self.spans = documents, branches, spans
        self._made: dict[int | None, Any] = {}

    @classmethod
    def of(
        cls,
        document_ids: Tensor | None,
        branch_ids: Tensor | None,
        span_ids: Tensor | None,
    ) -> SequenceMask | None:
        """The mask of ids (B, S); None where no token has a branch or a span, so that attention is causal inside of
        documents. Reads the ids: a host sync each where they lie on an accelerator. ValueError for ids of other shapes.
        """
        given = [t for t in (branch_ids, span_ids, document_ids) if t is not None]
        shapes = [tuple(t.shape) for t in given]
        if len(set(shapes)) > 1:
            rule = "of branch_ids, span_ids and document_ids must be one shape (B, S)"
            raise invalid("shapes", "shape", shapes, rule, "give the ids of full rows (cp = 1)")
        branched = branch_ids is not None and bool((branch_ids > 0).any())
        spanned = span_ids is not None and bool((span_ids >= 0).any())
        if not (branched or spanned):
            return None
        documents = torch.zeros(shapes[0], dtype=torch.int64)
        if document_ids is not None:
            ids = document_ids.cpu()
            # equal ids apart are two documents
            documents[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
            documents.masked_fill_(ids < 0, -1)  # padding
        nothing = torch.zeros_like(documents)
        branches = nothing if branch_ids is None else branch_ids.cpu()
        spans = nothing - 1 if span_ids is None else span_ids.cpu()
        return cls(documents, branches, spans)

    def to(self, device: torch.device) -> SequenceMask:
        """The same on a device, without a sync."""
        ids = self.documents, self.branches, self.spans
        return SequenceMask(*(t.to(device, non_blocking=True) for t in ids))

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key, numbers of tokens in a sequence; of any shapes that broadcast."""
        documents, branches, spans = self.documents, self.branches, self.spans
        document, branch = documents[row, query], branches[row, key]
        together = (document >= 0) & (document == documents[row, key])
        together = together & ((branch == 0) | (branch == branches[row, query]))
        ahead = (spans[row, query] >= 0) & (spans[row, query] == spans[row, key])
        return (query == key) | (together & ((key <= query) | ahead))

    def prepare(self, spec: AttentionSpec, x: Tensor) -> None:
        """Make the mask of a window on the device of x; ValueError for an attention that it is not for."""
        if spec.mask != "causal":
            rule = "must be 'causal' where rows have branches or tokens that see ahead, which are masks of their own"
            raise invalid("attention.mask", "excludes", spec.mask, rule, "leave it out")
        if spec.window in self._made:
            return
        if x.device.type == "cpu":
            self._made[spec.window] = _dense(self, spec.window)
            return
        if spec.needs_scores:
            key, value = ("softcap", spec.softcap) if spec.softcap else ("sinks", spec.sinks)
            rule = f"is not computed on {x.device.type} with branches or tokens that see ahead"
            fix = "leave it out, or use bidirectional = 'none' and rows without branches"
            raise invalid(f"attention.{key}", "unsupported", value, rule, fix)
        self._made[spec.window] = flex_mask(self.to(x.device), spec.window)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D) -> like q."""
        made = self._made[spec.window]
        if isinstance(made, Tensor):
            return attend_dense(q, k, v, made, spec, sinks)
        return attend_flex(q, k, v, made, spec)


def _dense(mask: SequenceMask, window: int | None) -> Tensor:
    """(B, 1, S, S) bool."""
    rows, size = mask.documents.shape
    index = torch.arange(size)
    seen = mask.sees(torch.arange(rows)[:, None, None], index[:, None], index)
    if window is not None:
        seen = seen & (index[:, None] - index < window)
    return seen[:, None]


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention under a boolean mask (B, 1, S, S): q (B, S, H, D), k and v (B, S, K, D) -> like q."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return attend_masked(q, k, v, mask, spec, sinks).transpose(1, 2)


def flex_mask(mask: SequenceMask, window: int | None = None) -> Any:
    """The block mask of FlexAttention, on the device of the mask's ids."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = mask.sees(row, query, key)
        return seen if window is None else seen & (query - key < window)

    rows, size = mask.documents.shape
    return create_block_mask(sees, rows, None, size, size, device=mask.documents.device)


def planned_spans(
    name: str,
    tokens: Tensor,
    plan: Callable[[], SequencePlan] | None,
    cache: KVCache | None,
) -> Tensor | None:
    """Ids (B, S) of the spans by `name` of tokens that come without, from the `plan` of tokens with images; None where
    all is causal.

    The first tokens of a cache are a prefix, later ones are causal. Raises ValueError where tokens and images do not tell.
    """
    past, several = 0 if cache is None else cache.length, tokens.size(1) > 1
    if past and (plan is not None or (name == "prefix_lm" and several)):
        rule = f"needs all tokens that see ahead to be the first of a cache, and it holds {past} tokens"
        fix = "give images, and a full prefix, in the first call (no prefill_chunk)"
        raise invalid("bidirectional", "cache", name, rule, fix)
    if past:
        return None
    if name == "prefix_lm" and cache is not None:
        return torch.zeros(tokens.shape[:2], dtype=torch.int64)
    if name == "prefix_lm" or (plan is not None and name == "clip") or tokens.is_floating_point():
        rule = f"must be given with bidirectional {name!r}, as these tokens do not show which of them see ahead"
        fix = "give SequencePlan.spans, or data with the option bidirectional"
        raise invalid(SPAN_INPUTS[name], "missing", ..., rule, fix)
    return None if plan is None else plan().spans(name)


def check_branches(branch_ids: Tensor, here: Tensor | None, cache: KVCache | None) -> None:
    """ValueError for branches next to a cache, and for images of blocks of cross-attention (`here`, (B, S) bool) in a
    branch, of which others would count them."""
    if cache is not None:
        rule = "must be left out with a cache, whose rows grow at one end"
        raise invalid("branch_ids", "cache", ..., rule, "give a row for each branch")
    if here is not None and here.device.type == "cpu" and bool((here & (branch_ids > 0)).any()):
        rule = "of fusion.name 'cross_attention' must stand in the shared part of a row, and a branch has one"
        raise invalid("images", "branch", ..., rule, "move it there, or use joint_decoder")


def build_mask(
    layers: nn.ModuleDict,
    document_ids: Tensor | None,
    branch_ids: Tensor | None,
    span_ids: Tensor | None,
) -> SequenceMask | None:
    """The mask of ids (B, S), None where there is nothing to mask; ValueError for blocks whose mixer computes none."""
    mask = SequenceMask.of(document_ids, branch_ids, span_ids)
    for key, block in layers.items() if mask is not None else ():
        takes = any(hasattr(module, "attend") for module in block.modules())
        if not takes and not key.startswith("cross_"):
            rule = (
                "has no attention that takes a mask, which branches and tokens that see ahead need"
            )
            raise invalid(f"layers.{key}", "mask", ..., rule, "use mixer 'attention' or 'mla'")
    return mask


def require_no_mask(mask: SequenceMask | None) -> None:
    """ValueError for a mask of rows of which ranks hold parts."""
    if mask is not None:
        rule = (
            "must be 1 with branches or tokens that see ahead, which need full sequences on a rank"
        )
        raise invalid("cp", "split_rows", ..., rule, "use cp = 1")


__getattr__ = renamed(__name__)
