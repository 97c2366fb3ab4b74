"""All experts' feed-forwards in one differentiable step.

Shapes: R rows sorted by expert, E experts, D width, F width inside.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forge_moe.gemm.groups import Groups
from forge_moe.gemm.products import Products

Optional = Tensor | None


class GroupedFeedForward(Function):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))) without a gate, with each row's own expert.

    One function of its own, not a chain of ops, so that (1) the hidden rows (R, F) are not kept but made
    again from gate and up, (2) a tail beyond the groups is cut off exactly twice, from the output and from
    the gradient of x, (3) gradients reach the kernels contiguous. Keeps x, gate and up: R (D + 2 F) values.
    No second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_w: Optional,
        up_w: Tensor,
        down_w: Tensor,
        gate_b: Optional,
        up_b: Optional,
        down_b: Optional,
        groups: Groups,
        products: Products,
    ) -> Tensor:
        gate = None if gate_w is None else _affine(x, gate_w, gate_b, groups, products)  # (R, F)
        up = _affine(x, up_w, up_b, groups, products)  # (R, F)
        out = _affine(_activate(gate, up), down_w, down_b, groups, products)  # (R, D)
        if not groups.full:
            out.masked_fill_(groups.tail(x.size(0)), 0.0)
        ctx.save_for_backward(x, gate, up, gate_w, up_w, down_w, groups.counts, groups.ends)
        ctx.groups = groups._replace(counts=None, ends=None)
        ctx.products = products
        ctx.has_bias = (gate_b is not None, up_b is not None, down_b is not None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional, ...]:
        x, gate, up, gate_w, up_w, down_w, counts, ends = ctx.saved_tensors
        groups: Groups = ctx.groups._replace(counts=counts, ends=ends)
        products: Products = ctx.products
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        grad = grad.contiguous()
        grad_hidden = products.multiply(grad, down_w.transpose(1, 2), groups)  # (R, F)
        hidden, grad_gate, grad_up = _activate_backward(gate, up, grad_hidden)
        grad_down_w = products.outer(hidden, grad, groups) if needs_down else None
        del hidden, grad_hidden
        grad_gate_w = products.outer(x, grad_gate, groups) if needs_gate else None
        grad_up_w = products.outer(x, grad_up, groups) if needs_up else None
        grad_x = None
        if needs_x:
            grad_x = products.multiply(grad_up, up_w.transpose(1, 2), groups)  # (R, D)
            if gate_w is not None:
                grad_x += products.multiply(grad_gate, gate_w.transpose(1, 2), groups)
            if not groups.full:
                grad_x.masked_fill_(groups.tail(x.size(0)), 0.0)
        grad_biases = (
            _sum_rows(rows, groups, products) if there else None
            for rows, there in zip((grad_gate, grad_up, grad), ctx.has_bias)
        )
        return (grad_x, grad_gate_w, grad_up_w, grad_down_w, *grad_biases, None, None)


def _affine(x: Tensor, w: Tensor, b: Optional, groups: Groups, products: Products) -> Tensor:
    out = products.multiply(x, w, groups)
    if b is not None:
        out += b.index_select(0, groups.experts_of_rows(x.size(0)))
    return out


def _sum_rows(rows: Tensor, groups: Groups, products: Products) -> Tensor:
    """Sum of each expert's rows (E, N), by the same kernel: no atomics, so the same bits every time."""
    ones = rows.new_ones(rows.size(0), 8)  # 8 columns: kernels want 16 bytes
    return products.outer(ones, rows, groups)[:, 0]


def _activate(gate: Optional, up: Tensor) -> Tensor:
    return F.gelu(up) if gate is None else F.silu(gate).mul_(up)


def _activate_backward(gate: Optional, up: Tensor, grad: Tensor) -> tuple[Tensor, Optional, Tensor]:
    """hidden, and the gradients of gate and up, from the gradient of hidden."""
    if gate is None:
        return F.gelu(up), None, torch.ops.aten.gelu_backward(grad, up)
    act = F.silu(gate)
    hidden = act * up
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return hidden, grad_gate, act.mul_(grad)
