"""Cross-entropy of logits, and of hidden states and the weight of the head without the logits of all tokens.

The arithmetic is `_shared/cross_entropy.py`; forge_parallel has the same losses of a sharded vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from forge_core._shared.cross_entropy import (
    Head,
    Labels,
    TokenLoss,
    Vocab,
    cast_like_autocast,
    loss_of_hidden,
    loss_of_logits,
    wide_dtype,
)
from forge_core._shared.problems import invalid


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLoss:
    """Negative log-likelihood of `labels`, summed in fp32 whatever the dtype of the logits (fp64 for fp64).

    `loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean`

    Args:
        logits: (..., V), floating point. `labels[t]` is the target of `logits[t]`: shift before calling.
        labels: (...), integers in [0, V), or `ignore_index` for tokens without a target.
        ignore_index: the label that contributes neither loss nor gradient nor count.
        weights: (...), floating point: the factor of each label's loss, 1 by default. Weights of ignored labels are
            not read.
        z_loss: coefficient of the squared log-sum-exp of each token's logits, which keeps logits near zero
            (PaLM: 1e-4).
        label_smoothing: fraction of the target that is spread evenly over the vocabulary, as in
            `torch.nn.functional.cross_entropy`.

    Weights multiply all terms of a label. Without a valid label the sum is zero and still has a graph. The gradient has
    the dtype of the logits; for an ignored token it is zero, or NaN if its logits are not finite (as in torch; hiding
    that would cost a third more time). First derivatives only.

    Raises: ValueError if shapes or dtypes do not fit, a coefficient is out of range or, on a CPU, a label is out of
        range; on CUDA such a label trips a device-side assertion, because a check costs a sync.

    Cost: keeps the logits for the backward, which reads them once more, and at most two fp32 blocks (16-bit logits are
    cast first); no host sync. Under `torch.compile` it consists of operators that the compiler fuses itself.
    """
    if logits.ndim < 1 or logits.shape[:-1] != labels.shape:
        rule = f"must have the shape of logits {tuple(logits.shape)} without the last dim"
        raise invalid("labels", "shape", tuple(labels.shape), rule, "shift both by slicing")
    if not logits.is_floating_point():
        raise invalid("logits", "dtype", logits.dtype, "must be floating point", "pass raw scores")
    vocab = Vocab.of(logits.size(-1), z_loss, label_smoothing)
    found = Labels.of(labels, weights, ignore_index, vocab.size, wide_dtype(logits))
    return loss_of_logits(logits.reshape(-1, logits.size(-1)), found, labels.shape, vocab)


def fused_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenLoss:
    """`cross_entropy(x @ weight.T, labels, ...)` block by block: x (..., D), weight (V, D), labels and weights (...).

        model(tokens, loss=lambda hidden, weight: fused_cross_entropy(hidden, weight, labels).sum)

    `LinearCrossEntropy` is the same as a module.
    With `scale` and `softcap` logits are `softcap * tanh(scale * x @ weight.T / softcap)`. `weight` must have all ids
    of the vocabulary. Matmuls have the dtype of x (under autocast its own), the softmax is in fp32, and the gradient of
    the weight is summed over blocks in fp32. First derivatives only.

    Raises ValueError as `cross_entropy`, and for matmuls in fp16 with gradients.
    Cost: no (N, V) tensor; with gradients three matmuls, as with all logits, and from the forward to the backward both
    gradients, (N, D) in the dtype of x and (V, D) in fp32; without gradients one matmul. No host sync.
    """
    if x.shape[:-1] != labels.shape or weight.ndim != 2 or x.size(-1) != weight.size(1):
        size = f"the last dim of weight {tuple(weight.shape)}"
        rule = f"must have the shape of x {tuple(x.shape)} without its last dim, which is {size}"
        fix = "shift tokens and labels by slicing"
        raise invalid("labels", "shape", tuple(labels.shape), rule, fix)
    vocab, head = Vocab.of(len(weight), z_loss, label_smoothing), Head.of(scale, softcap)
    x, weight = cast_like_autocast(x), cast_like_autocast(weight)
    found = Labels.of(labels, weights, ignore_index, vocab.size, wide_dtype(x))
    return loss_of_hidden(x.reshape(-1, x.size(-1)), weight, found, labels.shape, vocab, head)


class LinearCrossEntropy(nn.Module):
    """`fused_cross_entropy` as a module: hidden states (..., D), head's weight (V, D), labels (...) -> `TokenLoss`.

        loss = LinearCrossEntropy(z_loss=1e-4)
        total = model(tokens, loss=lambda hidden, weight, **head: loss(hidden, weight, labels, **head).sum)

    A model gives the keyword `softcap` if it has one. Without a model, `loss(hidden, head.weight, labels)` is enough.
    Arguments, errors and cost are those of `fused_cross_entropy`.
    """

    def __init__(
        self, ignore_index: int = -100, *, z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.ignore_index, self.z_loss, self.label_smoothing = ignore_index, z_loss, label_smoothing

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> TokenLoss:
        return fused_cross_entropy(
            hidden,
            weight,
            labels,
            self.ignore_index,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            **options,
        )

    def extra_repr(self) -> str:
        terms = f"z_loss={self.z_loss}, label_smoothing={self.label_smoothing}"
        return f"ignore_index={self.ignore_index}, {terms}"
