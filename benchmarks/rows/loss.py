"""The loss of a linear head, forward and backward, which never holds all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.rows import Row, Setting
from torch import Tensor


class Head(NamedTuple):
    """Case: hidden states (N, D), weight (V, D), labels (N,)."""

    x: Tensor
    weight: Tensor
    labels: Tensor


def head(setting: Setting, vocab: int, dtype: torch.dtype) -> Head:
    tokens, dim, vocab = setting.of(
        (2048, 512, vocab), (64, 16, vocab // 250), (16_384, 2048, vocab)
    )
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, dim), torch.randn(vocab, dim).mul_(dim**-0.5)
    leaves = (t.to(setting.device, dtype).requires_grad_() for t in (x, weight))
    return Head(*leaves, torch.randint(0, vocab, (tokens,)).to(setting.device))


def step(case: Head, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
    """A mean and its gradients; returns the gradient of the hidden states."""

    def run() -> Tensor:
        case.x.grad = case.weight.grad = None
        (loss(*case) / len(case.labels)).backward()
        assert case.x.grad is not None
        return case.x.grad

    return run


def forge(case: Head) -> Callable[[], Tensor]:
    from forge_core import fused_cross_entropy

    return step(case, lambda x, w, y: fused_cross_entropy(x, w, y).sum)


def torch_own(case: Head) -> Callable[[], Tensor]:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("this torch has no F.linear_cross_entropy")
    return step(case, lambda x, w, y: F.linear_cross_entropy(x, w, y, reduction="sum"))


def full_logits(case: Head) -> Callable[[], Tensor]:
    return step(case, lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, reduction="sum"))


class Blockwise(torch.autograd.Function):
    """The sum over blocks of 512 tokens, whose gradients are made in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        total, grad_x, grad_w = x.new_zeros((), dtype=torch.float32), torch.empty_like(x), None
        for start in range(0, len(x), 512):
            at = slice(start, start + 512)
            p = (x[at] @ weight.mT).float()  # (block, V)
            lse = p.logsumexp(1, keepdim=True)
            total += (lse[:, 0] - p.gather(1, labels[at, None])[:, 0]).sum()
            p.sub_(lse).exp_().scatter_add_(1, labels[at, None], p.new_full((len(p), 1), -1.0))
            gradient = p.to(x.dtype)
            grad_x[at] = gradient @ weight
            part = gradient.mT @ x[at]
            grad_w = part if grad_w is None else grad_w.add_(part)
        ctx.save_for_backward(grad_x, grad_w)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *(saved * grad for saved in ctx.saved_tensors), None


def blockwise(case: Head) -> Callable[[], Tensor]:
    return step(case, Blockwise.apply)


def liger(case: Head) -> Callable[[], Tensor]:
    """Liger's fused kernel, which needs a GPU."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return step(case, lambda x, w, y: loss(w, x, y))


_DTYPES = {"bf16": (torch.bfloat16, 0.05), "fp32": (torch.float32, 1e-4)}
ROWS = [
    Row(
        f"loss-v{vocab // 1000}k-{name}", head,
        {"forge": forge, "torch": torch_own, "full_logits": full_logits, "blockwise": blockwise, "liger": liger},
        "2,048 tokens of dim 512 (h100: 16,384 of 2,048), both gradients; torch: F.linear_cross_entropy; full_logits: "
        "F.cross_entropy of fp32 logits; blockwise: gradients of 512 tokens at a time in the forward",
        {"vocab": vocab, "dtype": dtype}, tolerance=tolerance,
    )
    for vocab in (32_000, 128_000) for name, (dtype, tolerance) in _DTYPES.items()
]  # fmt: skip
