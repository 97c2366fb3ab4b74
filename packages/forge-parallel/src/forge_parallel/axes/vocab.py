"""Cross-entropy over logits whose vocabulary is sharded over ranks.

Shapes: N tokens (all leading dims flattened), R rows of one block, W ids of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
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
    wide_dtype,
)


def vocab_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Any,
    ignore_index: int = -100,
    *,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> VocabLoss:
    """Sum of token losses over cut logits, with `weights` (...) of the labels' shape each times its weight.

        found = vocab_cross_entropy(model(tokens), labels, meshes.tp)
        total, count = found.sum, found.count

    logits (..., W) are this rank's: ids rank W to (rank + 1) W, equal W on all ranks, those beyond the
    vocabulary -inf (as `tensor_parallel` leaves them). labels (...) are whole ids, equal on all ranks, or
    `ignore_index`. `axis` is a DeviceMesh of one axis or has `.group`, `.size`, `.rank`. The result is
    equal on all ranks, and is not to be summed over them; so is grad's factor. Softmax in fp32, gradient
    in the dtype of the logits, zero for ignored tokens; without a label the sum is zero, with a graph.

    `z_loss` is the coefficient of the squared log-sum-exp of each row, `label_smoothing` the share of the target
    that is spread over the `vocab_size` ids of the whole vocabulary, by default all columns: give it for one
    that ranks do not divide.

    Raises ValueError when shapes do not fit, a coefficient is out of range or, on a CPU, when a label is no id.
    Cost: keeps the logits; one all-gather of 2 N fp32 forward (3 N to smooth), none backward; no host sync on CUDA.
    """
    group = NamedGroup.of(axis)
    if logits.shape[:-1] != labels.shape:
        rule = f"must have the shape of logits {tuple(logits.shape)} without the last dim"
        raise invalid("labels", "shape", tuple(labels.shape), rule, "shift both by slicing")
    flat = logits.reshape(-1, logits.size(-1))  # (N, W)
    part = VocabPart.of(group, flat.size(1), vocab_size, (z_loss, label_smoothing))
    ids, valid, scales, count = label_scales(labels, weights, ignore_index, wide_dtype(logits))
    check_labels(ids, valid, part.vocab_size)
    total, shown, each = _VocabCrossEntropy.apply(flat, ids, valid, scales, part)
    return VocabLoss(total, count, shown[0], shown[1], each.view(labels.shape))


class _VocabCrossEntropy(torch.autograd.Function):
    """(N, W) logits, (N,) labels, (N,) bool, (N,) fp32 or None -> trained sum, 0-dim fp32, and to show its parts (2,) and
    token losses (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        valid: Tensor,
        weights: Tensor | None,
        part: VocabPart,
    ) -> tuple[Tensor, Tensor, Tensor]:
        target, is_local = part.find(labels, valid)
        found = part.empty(logits)  # (2 or 3, N)
        for rows in row_blocks(logits):
            part.of_rows(logits[rows].to(found.dtype), target[rows], found[:, rows])
        found = part.join(found, is_local)
        ctx.part = part
        ctx.save_for_backward(logits, found[0], target, is_local, valid, weights)
        total, shown, each = part.sums(found, valid, weights)
        ctx.mark_non_differentiable(shown, each)
        return total, shown, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, log_z, target, is_local, valid, weights = ctx.saved_tensors
        scale = (grads[0] * (valid if weights is None else weights))[:, None]  # (N, 1)
        out = torch.empty_like(logits)
        for rows in row_blocks(logits):
            wide = logits[rows].to(log_z.dtype, copy=True)  # (R, W)
            out[rows] = ctx.part.slopes_(
                wide, log_z[rows], target[rows], is_local[rows], scale[rows]
            )
        return out, None, None, None, None
