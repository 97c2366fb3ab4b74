"""Cross-entropy from hidden states and a rank's rows of the head's weight, without the logits of all tokens.

Shapes: N tokens (all leading dims flattened), R rows of one block, D width, W ids of a rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel._shared.problems import invalid
from forge_parallel.axes.collectives import NamedGroup
from forge_parallel.axes.vocab_part import (
    VocabLoss,
    VocabPart,
    check_labels,
    label_scales,
    row_blocks,
    slices,
    wide_dtype,
)

# Elements of one block of logits, and its fewest rows: with fewer, adding to the gradient of a large weight costs
# more than the products.
_BLOCK = 2**23
_ROWS = 128


class _Head(NamedTuple):
    """How a product becomes logits, and what is computed of them."""

    scale: float
    softcap: float | None
    part: VocabPart

    def logits(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor of the logits (R, W) of a product."""
        logits = product.to(dtype, copy=True).mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def vocab_fused_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Any,
    ignore_index: int = -100,
    *,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> VocabLoss:
    """`vocab_cross_entropy(x @ weight.T, labels, axis, ...)` block by block: x (..., D), this rank's weight (W, D).

        def loss(x, weight):                       # of a head that tensor_parallel has cut
            return vocab_fused_cross_entropy(x, weight, labels, meshes.tp, vocab_size=vocab_size).sum
        model(tokens, then=loss)

    weight holds the rows of ids rank ceil(V / n) on, without padding; x and labels are equal on all ranks. The gradient
    of x is this rank's part of a sum over ranks, as that of the input of a column-wise layer is. `scale` and
    `softcap`: logits are `softcap * tanh(scale * x @ weight.T / softcap)`. Dtypes as in `vocab_cross_entropy`,
    products in that of x (under autocast its own).

    Raises ValueError as `vocab_cross_entropy`, for products in fp16 with grad, and on all ranks if the last would have no ids.
    Cost: no (N, W) tensor; three products with grad, and from forward to backward both gradients, (N, D) in the
    dtype of x and (W, D) in fp32; one all-gather of 2 R fp32 a block; no host sync on CUDA.
    """
    group = NamedGroup.of(axis)
    if x.shape[:-1] != labels.shape or weight.ndim != 2 or x.size(-1) != weight.size(1):
        rule = f"must be the labels' shape {tuple(labels.shape)} and the width of weight {tuple(weight.shape)}"
        raise invalid("x", "shape", tuple(x.shape), rule, "shift tokens and labels by slicing")
    if softcap is not None and not softcap > 0:
        rule = "must be above 0, or None for no cap"
        raise invalid("softcap", "range", softcap, rule, "use 30")
    width = len(weight) if vocab_size is None else -(-vocab_size // group.size)
    part = VocabPart.of(group, width, vocab_size, (z_loss, label_smoothing))
    # asked alike on all ranks, or the others would wait for the one that raises
    if (group.size - 1) * width >= part.vocab_size:
        rule = f"must leave ids for the last of {group.size} ranks, of which each has {width}"
        fix = "use fewer ranks, or a larger vocabulary"
        raise invalid("vocab_size", "empty", part.vocab_size, rule, fix)
    if len(weight) != part.real:
        rule = f"must have {part.real} rows, at least one, on rank {group.rank} of {group.size} for {part.vocab_size} ids"
        fix = "give the size of the whole vocabulary"
        raise invalid("weight", "shape", tuple(weight.shape), rule, fix)
    x, weight = _as_product_casts(x), _as_product_casts(weight)
    ids, valid, scales, count = label_scales(labels, weights, ignore_index, wide_dtype(x))
    check_labels(ids, valid, part.vocab_size)
    scales = valid.to(wide_dtype(x)) if scales is None else scales
    needs = (x.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    if any(needs) and x.dtype == torch.float16:
        rule = "must be bf16 or wider with grad: gradients are rounded to it before a loss scaler's factor is known"
        raise invalid("x", "dtype", x.dtype, rule, "use bf16, or vocab_cross_entropy")
    head, flat = _Head(scale, softcap, part), x.reshape(-1, x.size(-1))
    with torch.autocast(x.device.type, enabled=False):
        total, shown, each = _Fused.apply(flat, weight, ids, valid, scales, head, needs)
    return VocabLoss(total, count, shown[0], shown[1], each.view(labels.shape))


def _as_product_casts(tensor: Tensor) -> Tensor:
    """A factor in the dtype in which a product has it: that of autocast, if enabled, but for float64."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Fused(torch.autograd.Function):
    """(N, D), (W, D), (N,) labels, (N,) bool, (N,) fp32 -> trained sum, 0-dim fp32, and to show its parts (2,) and
    token losses (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        valid: Tensor,
        scales: Tensor,
        head: _Head,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        part = head.part
        target, is_local = part.find(labels, valid)
        found = part.empty(x)  # (2 or 3, N)
        grad_x = torch.empty_like(x) if needs[0] else None
        grad_weight = weight.new_zeros(weight.shape, dtype=found.dtype) if needs[1] else None
        # equal on all ranks, also on the one with fewer ids, as each block has its collective
        for rows in slices(len(x), max(_ROWS, _BLOCK // part.width)):
            block = F.linear(x[rows], weight)  # (R, W)
            here = (target[rows], is_local[rows], scales[rows, None])
            found[:, rows] = _slopes_(block, *here, head, any(needs))
            if grad_x is not None:
                torch.mm(block, weight, out=grad_x[rows])
            if grad_weight is not None:
                _add_product(grad_weight, block.mT, x[rows])
            del block  # or it would stand beside the next one
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        total, shown, each = part.sums(found, valid, scales)
        ctx.mark_non_differentiable(shown, each)
        return total, shown, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        # not in place: a pipeline that splits the backward comes twice
        if grad_x is not None:
            grad_x = grad_x * grads[0]
        if grad_weight is not None:
            out = torch.empty_like(grad_weight, dtype=ctx.dtype)
            grad_weight = torch.mul(grad_weight, grads[0], out=out)
        return grad_x, grad_weight, None, None, None, None, None


def _slopes_(
    block: Tensor, target: Tensor, is_local: Tensor, scales: Tensor, head: _Head, needed: bool
) -> Tensor:
    """What `VocabPart.join` gives of a block of products (R, W), which becomes the slopes where they are needed."""
    part = head.part
    found = part.empty(block)
    for rows in row_blocks(block):
        part.of_rows(head.logits(block[rows], found.dtype), target[rows], found[:, rows])
    found = part.join(found, is_local)
    for rows in row_blocks(block) if needed else ():
        logits = head.logits(block[rows], found.dtype)
        inner = None if head.softcap is None else 1 - (logits / head.softcap).square_()
        slopes = part.slopes_(logits, found[0, rows], target[rows], is_local[rows], scales[rows])
        block[rows] = (slopes if inner is None else slopes.mul_(inner)).mul_(head.scale)
    return found


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
