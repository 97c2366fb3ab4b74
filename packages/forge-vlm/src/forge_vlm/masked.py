"""Which tokens of a forward see ahead where its caller does not say, and what cannot be masked.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from forge_core import KVCache
from forge_vlm._shared.problems import invalid
from forge_vlm.mask import RowMask
from forge_vlm.plan import SPAN_INPUTS, SequencePlan

__all__ = ["check_branches", "masked", "planned_spans", "refuse_split_mask"]


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
    """ValueError for branches beside a cache, and for images of blocks of cross-attention (`here`, (B, S) bool) in a
    branch, of which others would count them."""
    if cache is not None:
        rule = "must be left out with a cache, whose rows grow at one end"
        raise invalid("branch_ids", "cache", ..., rule, "give a row for each branch")
    if here is not None and here.device.type == "cpu" and bool((here & (branch_ids > 0)).any()):
        rule = "of fusion.name 'cross_attention' must stand in the shared part of a row, and a branch has one"
        raise invalid("images", "branch", ..., rule, "move it there, or use joint_decoder")


def masked(
    layers: nn.ModuleDict,
    document_ids: Tensor | None,
    branch_ids: Tensor | None,
    span_ids: Tensor | None,
) -> RowMask | None:
    """The mask of ids (B, S), None where there is nothing to mask; ValueError for blocks whose mixer computes none."""
    mask = RowMask.of(document_ids, branch_ids, span_ids)
    for key, block in layers.items() if mask is not None else ():
        takes = any(hasattr(module, "attend") for module in block.modules())
        if not takes and not key.startswith("cross_"):
            rule = (
                "has no attention that takes a mask, which branches and tokens that see ahead need"
            )
            raise invalid(f"layers.{key}", "mask", ..., rule, "use mixer 'attention' or 'mla'")
    return mask


def refuse_split_mask(mask: RowMask | None) -> None:
    """ValueError for a mask of rows of which ranks hold parts."""
    if mask is not None:
        rule = (
            "must be 1 with branches or tokens that see ahead, which need full sequences on a rank"
        )
        raise invalid("cp", "split_rows", ..., rule, "use cp = 1")
