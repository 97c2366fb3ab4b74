"""Cross-entropy from hidden states and the head's weight, without the logits of all tokens.

Shapes: N tokens (all leading dims flattened), R rows of one block, D width, V vocabulary.

A block of rows is multiplied by the weight, its logits become their own slopes in place, and both gradients
take their share of them, all in the forward: three products, as many as with whole logits. The backward
multiplies the two gradients by the factor that it is given, in place where it is the graph's last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core._shared.problems import invalid
from forge_core._torch_compat import graph_is_kept
from forge_core.loss.terms import Terms, terms_of, wide_dtype
from forge_core.loss.token import _BLOCK_CPU, TokenLoss, check_labels, explain_labels

# Elements of one block of logits (32 MB in fp32), and its fewest rows: with fewer, adding to the gradient of a
# large weight costs more than the products (128,000 ids and width 512: 4.3 s with 65 rows, 3.7 s with 131).
_BLOCK = 2**23
_ROWS = 128


class _Head(NamedTuple):
    """How a product becomes logits, and what is computed of them."""

    scale: float
    softcap: float | None
    terms: Terms

    def logits(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits (R, V) of a product: itself, where it is one of `dtype` and nothing is to be done."""
        if self.scale == 1.0 and self.softcap is None:
            return product.to(dtype)
        logits = product.to(dtype, copy=True).mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slopes_of_product_(self, slopes: Tensor, logits: Tensor) -> Tensor:
        """From slopes in the logits to those in the product, in place."""
        if self.softcap is not None:
            slopes.mul_(1 - (logits / self.softcap).square_())
        return slopes if self.scale == 1.0 else slopes.mul_(self.scale)


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

        model(tokens, then=lambda x, weight: fused_cross_entropy(x, weight, labels).sum)

    With `scale` and `softcap` logits are `softcap * tanh(scale * x @ weight.T / softcap)`. The whole vocabulary
    must be in `weight`. Products have the dtype of x (under autocast its own), the softmax is in fp32, and the
    gradient of the weight is summed over blocks in fp32. First derivatives only.

    Raises ValueError as `cross_entropy`, and for products in fp16 with grad.
    Cost: no (N, V) tensor; with grad three products, as with whole logits, and from the forward to the backward
    both gradients, (N, D) in the dtype of x and (V, D) in fp32; without grad one product. No host sync.
    """
    if x.shape[:-1] != labels.shape or weight.ndim != 2 or x.size(-1) != weight.size(1):
        size = f"the last dim of weight {tuple(weight.shape)}"
        rule = f"must have the shape of x {tuple(x.shape)} without its last dim, which is {size}"
        fix = "shift tokens and labels by slicing"
        raise invalid("labels", "shape", tuple(labels.shape), rule, fix)
    check_labels(labels, weights)
    if softcap is not None and not softcap > 0:
        raise invalid("softcap", "range", softcap, "must be above 0", "use 30, or None for no cap")
    head = _Head(scale, softcap, terms_of(z_loss, label_smoothing))
    x, weight = _as_product_casts(x), _as_product_casts(weight)
    flat = labels.reshape(-1).to(torch.int64)  # (N,)
    valid = flat != ignore_index
    scales, count = valid.to(wide_dtype(x)), valid.sum()
    if weights is not None:
        scales = weights.reshape(-1).to(scales.dtype).where(valid, 0.0)  # (N,)
        count = scales.double().sum()
    needs = (x.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    if any(needs) and x.dtype == torch.float16:
        reason = "they are rounded to it before the factor of a loss scaler is known"
        rule = f"must be bf16 or wider where gradients are needed: {reason}"
        raise invalid("x", "dtype", x.dtype, rule, "use bf16, or cross_entropy")
    target = flat.where(valid, 0)
    try:
        with torch.autocast(x.device.type, enabled=False):
            total, parts, each = _Fused.apply(
                x.reshape(-1, x.size(-1)), weight, target, valid, scales, head, needs
            )
    except (IndexError, RuntimeError) as error:
        explain_labels(flat, valid, len(weight), error)
        raise
    return TokenLoss(total, count, parts[0], parts[1], each.view(labels.shape))


def _as_product_casts(tensor: Tensor) -> Tensor:
    """A factor in the dtype in which a product has it: that of autocast, if enabled, but for float64."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Fused(torch.autograd.Function):
    """(N, D), (V, D), (N,) targets, (N,) bool, (N,) fp32 -> trained sum, 0-dim fp32, and to show its parts (2,) and
    token losses (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        valid: Tensor,
        scales: Tensor,
        head: _Head,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = head.terms.empty(x)  # (1 or 3, N)
        grad_x = torch.empty_like(x) if needs[0] else None
        grad_weight = weight.new_zeros(weight.shape, dtype=found.dtype) if needs[1] else None
        size = max(_ROWS, _BLOCK // len(weight))
        for rows in _slices(len(x), size):
            block = F.linear(x[rows], weight)  # (R, V)
            here = (target[rows, None], scales[rows, None], found[:, rows])
            _slopes_(block, *here, head, any(needs))
            if grad_x is not None:
                torch.mm(block, weight, out=grad_x[rows])
            if grad_weight is not None:
                _add_product(grad_weight, block.mT, x[rows])
            del block  # or it would stand beside the next one
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        total, parts, each = head.terms.sums(found, valid, scales, len(weight))
        ctx.mark_non_differentiable(parts, each)
        return total, parts, each

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = graph_is_kept()  # a pipeline that splits the backward comes twice

        def scaled(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if grad is None:
                return None
            # not with `out` in another dtype, which makes a whole product in fp32 first
            return (grad * grads[0] if kept else grad.mul_(grads[0])).to(dtype)

        grad_x, grad_weight = ctx.saved_tensors
        dtype = ctx.dtype
        return scaled(grad_x, dtype), scaled(grad_weight, dtype), None, None, None, None, None


def _slopes_(
    block: Tensor, target: Tensor, scales: Tensor, found: Tensor, head: _Head, needed: bool
) -> None:
    """Fill `found` (1 or 3, R), and where they are needed put the slopes of a block of products (R, V) in its place.

    On a CPU a few rows at a time, whose softmax stays in cache.
    """
    size = len(block) if block.device.type != "cpu" else max(1, _BLOCK_CPU // block.size(1))
    for rows in _slices(len(block), size):
        logits = head.logits(block[rows], found.dtype)
        p = F.log_softmax(logits, dim=-1)
        head.terms.of_rows(logits, p, target[rows], found[:, rows])
        if needed:
            lse = found[2, rows] if head.terms.z_loss else None
            head.terms.slopes_(p.exp_(), target[rows], scales[rows], lse)
            block[rows] = head.slopes_of_product_(p, logits)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of total; a product in another one is made some rows at a time."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    for rows in _slices(len(total), max(1, _BLOCK // total.size(1))):
        total[rows] += a[rows] @ b


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
