"""Cross-entropy over a vocabulary that is sharded over ranks; the arithmetic is `_shared/cross_entropy.py`.

Shapes: W = ceil(V / n) ids of a rank, of V in the vocabulary over n ranks; D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from forge_parallel._shared.cross_entropy import (
    Head,
    Labels,
    TokenLoss,
    Vocab,
    cast_like_autocast,
    loss_of_hidden,
    loss_of_logits,
    wide_dtype,
)
from forge_parallel._shared.problems import invalid
from forge_parallel.axes.collectives import NamedGroup

VocabLoss = TokenLoss


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
) -> TokenLoss:
    """Sum of token losses over sharded logits, each times its weight in `weights` (...) of the labels' shape.

        found = vocab_cross_entropy(model(tokens), labels, meshes.tp)
        total, count = found.sum, found.count

    logits (..., W) are this rank's: ids rank W to (rank + 1) W, equal W on all ranks, those outside of the
    vocabulary -inf (as `tensor_parallel` leaves them). labels (...) are ids of the full vocabulary, equal on all ranks,
    or `ignore_index`. `axis` is a DeviceMesh of one axis or has `.group`, `.size`, `.rank`. The result is
    equal on all ranks, and is not to be summed over them; so is its gradient's factor. Softmax in fp32, gradient
    in the dtype of the logits, zero for ignored tokens; without a label the sum is zero, with a graph.

    `z_loss` is the coefficient of the squared log-sum-exp of each token's logits, `label_smoothing` the fraction of the
    target that is spread over the `vocab_size` ids of the vocabulary, by default all columns: give it for one
    that ranks do not divide.

    Raises ValueError if shapes do not fit, a coefficient is out of range or, on a CPU, if a label is not an id.
    Cost: keeps the logits; one all-gather of 2 N fp32 forward (3 N to smooth), none backward; no host sync on CUDA.
    """
    if logits.shape[:-1] != labels.shape:
        rule = f"must have the shape of logits {tuple(logits.shape)} without the last dim"
        raise invalid("labels", "shape", tuple(labels.shape), rule, "shift both by slicing")
    group, width = NamedGroup.of(axis), logits.size(-1)
    vocab = Vocab.of(width, z_loss, label_smoothing, vocab_size or 0, group)
    found = Labels.of(labels, weights, ignore_index, vocab.size, wide_dtype(logits))
    return loss_of_logits(logits.reshape(-1, width), found, labels.shape, vocab)


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
) -> TokenLoss:
    """`vocab_cross_entropy(x @ weight.T, labels, axis, ...)` block by block: x (..., D), this rank's weight (W, D).

        def loss(x, weight):                       # of a head that tensor_parallel has sharded
            return vocab_fused_cross_entropy(x, weight, labels, meshes.tp, vocab_size=vocab_size).sum
        model(tokens, loss=loss)

    weight has the rows of the ids from rank * ceil(V / n) on, without padding; x and labels are equal on all ranks. The
    gradient of x is this rank's part of a sum over ranks, as for the input of a column-wise layer. `scale` and
    `softcap`: logits are `softcap * tanh(scale * x @ weight.T / softcap)`. Dtypes as in `vocab_cross_entropy`,
    matmuls in the dtype of x (under autocast its own).

    Raises ValueError as `vocab_cross_entropy`, for matmuls in fp16 with gradients, and on all ranks if the last would
    have no ids.
    Cost: no (N, W) tensor; three matmuls with gradients, and from forward to backward both gradients, (N, D) in the
    dtype of x and (W, D) in fp32; one all-gather of 2 R fp32 a block; no host sync on CUDA.
    """
    if x.shape[:-1] != labels.shape or weight.ndim != 2 or x.size(-1) != weight.size(1):
        rule = f"must be the labels' shape {tuple(labels.shape)} and the width of weight {tuple(weight.shape)}"
        raise invalid("x", "shape", tuple(x.shape), rule, "shift tokens and labels by slicing")
    group, head = NamedGroup.of(axis), Head.of(scale, softcap)
    width = len(weight) if vocab_size is None else -(-vocab_size // group.size)
    vocab = Vocab.of(width, z_loss, label_smoothing, vocab_size or 0, group)
    # equal on all ranks, or the others would wait for the one that raises
    if (group.size - 1) * width >= vocab.size:
        rule = f"must leave ids for the last of {group.size} ranks, of which each has {width}"
        fix = "use fewer ranks, or a larger vocabulary"
        raise invalid("vocab_size", "empty", vocab.size, rule, fix)
    if len(weight) != vocab.num_local:
        rule = f"must have {vocab.num_local} rows on rank {group.rank} of {group.size} for {vocab.size} ids"
        fix = "give the size of the full vocabulary"
        raise invalid("weight", "shape", tuple(weight.shape), rule, fix)

    x, weight = cast_like_autocast(x), cast_like_autocast(weight)
    found = Labels.of(labels, weights, ignore_index, vocab.size, wide_dtype(x))
    return loss_of_hidden(x.reshape(-1, x.size(-1)), weight, found, labels.shape, vocab, head)


#: Losses where each tp rank has a part of the logits, or of the head's weight, by the names of their unsharded forms.
VOCAB_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": vocab_cross_entropy,
    "fused_cross_entropy": vocab_fused_cross_entropy,
}
