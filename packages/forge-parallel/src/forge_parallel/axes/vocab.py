"""Cross-entropy over logits whose vocabulary is sharded over ranks.

Shapes: N tokens (all leading dims flattened), R rows of one block, W ids of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel._torch_compat import all_gather
from forge_parallel.axes.collectives import NamedGroup

# Elements of one fp32 block: on a CPU a share of its cache, on a GPU enough to amortise kernel launches.
_BLOCK_CPU = 2**20
_BLOCK_DEVICE = 2**27


def vocab_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Any,
    ignore_index: int = -100,
    *,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of token losses, 0-dim fp32 with a graph, and the number of tokens in it, 0-dim int64; with
    `weights` (...), floating point, of the labels' shape, each loss times its weight, and their sum in float64.

        total, count = vocab_cross_entropy(model(tokens), labels, meshes.tp)

    logits (..., W) are this rank's: ids rank W to (rank + 1) W, equal W on all ranks, those beyond the
    vocabulary -inf (as `tensor_parallel` leaves them). labels (...) are whole ids, equal on all ranks, or
    `ignore_index`. `axis` is a DeviceMesh of one axis or has `.group`, `.size`, `.rank`. The result is
    equal on all ranks, and is not to be summed over them; so is grad's factor. Softmax in fp32, gradient
    in the dtype of the logits, zero for ignored tokens; without a label the sum is zero, with a graph.

    Raises ValueError when shapes do not fit or, on a CPU, when a label is no id.
    Cost: keeps the logits; one all-gather of 2 N fp32 forward, none backward; no host sync on CUDA.
    """
    group = NamedGroup.of(axis)
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights {tuple(weights.shape)} must have the shape of labels {tuple(labels.shape)}; give one for "
            "each label"
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of logits {tuple(logits.shape)} without the last "
            "dim; shift both by slicing"
        )
    flat = logits.reshape(-1, logits.size(-1))  # (N, W)
    ids = labels.reshape(-1).to(torch.int64)  # (N,)
    valid = ids != ignore_index  # (N,)
    if type(ids) is Tensor and ids.device.type == "cpu":
        _check_labels(ids[valid], flat.size(1) * group.size)
    flat_weights, count = None, valid.sum()
    if weights is not None:
        flat_weights = weights.reshape(-1).float().where(valid, 0.0)  # (N,)
        count = flat_weights.double().sum()
    total: Tensor = _VocabCrossEntropy.apply(flat, ids, valid, flat_weights, group)
    return total, count


class _VocabCrossEntropy(torch.autograd.Function):
    """(N, W) logits, (N,) labels, (N,) bool, (N,) fp32 or None -> 0-dim fp32 sum."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        valid: Tensor,
        weights: Tensor | None,
        group: NamedGroup,
    ) -> Tensor:
        width = logits.size(1)
        local = labels - group.rank * width
        is_local = valid.clone()
        if group.rank:
            is_local &= local >= 0
        # no upper bound on the last rank: there an id beyond the vocabulary fails in the gather instead of counting 0
        if group.rank < group.size - 1:
            is_local &= local < width
        target = local.where(is_local, 0)[:, None]  # (N, 1)
        parts = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _row_blocks(logits):
            wide = logits[rows].float()  # (R, W)
            parts[0, rows] = wide.logsumexp(dim=-1)
            parts[1, rows] = wide.gather(1, target[rows])[:, 0]
        parts[1] = parts[1].where(is_local, 0.0)
        if group.size > 1:
            parts = all_gather(parts, group.size, group.name).view(group.size, 2, -1)
            parts = torch.stack((parts[:, 0].logsumexp(dim=0), parts[:, 1].sum(dim=0)))
        ctx.save_for_backward(logits, parts[0], target, is_local, valid, weights)
        losses = (parts[0] - parts[1]).where(valid, 0.0)  # (N,)
        return (losses if weights is None else losses * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        logits, total, target, is_local, valid, weights = ctx.saved_tensors
        scale = (grad * (valid if weights is None else weights))[:, None]  # (N, 1)
        out = torch.empty_like(logits)
        for rows in _row_blocks(logits):
            p = (logits[rows].float() - total[rows, None]).exp_().mul_(scale[rows])  # (R, W)
            out[rows] = p.scatter_add_(1, target[rows], -scale[rows] * is_local[rows, None])
        return out, None, None, None, None


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    limit = _BLOCK_CPU if logits.device.type == "cpu" else _BLOCK_DEVICE
    rows = max(1, limit // max(1, logits.size(1)))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _check_labels(labels: Tensor, num_ids: int) -> None:
    wrong = labels[(labels < 0) | (labels >= num_ids)]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} must be in [0, {num_ids}) or ignore_index; enlarge the vocabulary or check the "
            "tokenizer"
        )
