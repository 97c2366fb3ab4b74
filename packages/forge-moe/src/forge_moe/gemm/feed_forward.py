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
    the gradient of x, (3) gradients reach the kernels contiguous. Keeps x, gate and up, R (D + 2 F) values;
    backward takes 2 R F more. No second derivatives.
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
            # Not in place: selective recomputation keeps what the kernel gave, and refuses a change of it.
            out = out.masked_fill(groups.tail(x.size(0)), 0.0)
        ctx.save_for_backward(x, gate, up, gate_w, up_w, down_w, groups.counts, groups.ends)
        ctx.sizes, ctx.full, ctx.products = groups.sizes, groups.full, products
        ctx.has_bias = (gate_b is not None, up_b is not None, down_b is not None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional, ...]:
        x, gate, up, gate_w, up_w, down_w, counts, ends = ctx.saved_tensors
        groups, products = Groups(counts, ends, ctx.sizes, ctx.full), ctx.products
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        gate_bias, up_bias, down_bias = ctx.has_bias

        grad = grad.contiguous()
        act = None if gate is None else F.silu(gate)  # (R, F)
        hidden = F.gelu(up) if act is None else act * up  # (R, F)
        grad_down_w = products.outer(hidden, grad, groups) if needs_down else None
        grad_down_b = _sum_rows(grad, groups, products) if down_bias else None
        del hidden  # never more than two buffers of (R, F)
        flow = products.multiply(grad, down_w.transpose(1, 2), groups)  # (R, F)
        grad_up = torch.ops.aten.gelu_backward(flow, up) if act is None else act.mul_(flow)
        grad_up_w = products.outer(x, grad_up, groups) if needs_up else None
        grad_up_b = _sum_rows(grad_up, groups, products) if up_bias else None
        grad_x = products.multiply(grad_up, up_w.transpose(1, 2), groups) if needs_x else None
        grad_gate_w = grad_gate_b = None
        if gate is not None:
            flow.mul_(up)
            grad_gate = torch.ops.aten.silu_backward.grad_input(flow, gate, grad_input=flow)
            grad_gate_w = products.outer(x, grad_gate, groups) if needs_gate else None
            grad_gate_b = _sum_rows(grad_gate, groups, products) if gate_bias else None
            if grad_x is not None:
                grad_x += products.multiply(grad_gate, gate_w.transpose(1, 2), groups)
        if grad_x is not None and not groups.full:
            grad_x.masked_fill_(groups.tail(x.size(0)), 0.0)
        weights = (grad_gate_w, grad_up_w, grad_down_w)
        return (grad_x, *weights, grad_gate_b, grad_up_b, grad_down_b, None, None)


def _affine(x: Tensor, w: Tensor, b: Optional, groups: Groups, products: Products) -> Tensor:
    out = products.multiply(x, w, groups)
    if b is None:
        return out
    # Into the rows of biases, not into the product, which selective recomputation may have kept.
    return b.index_select(0, groups.experts_of_rows(x.size(0))).add_(out)


def _sum_rows(rows: Tensor, groups: Groups, products: Products) -> Tensor:
    """Sum of each expert's rows (E, N), by the same kernel: no atomics, so the same bits every time."""
    ones = rows.new_ones(rows.size(0), 8)  # 8 columns: kernels want 16 bytes
    return products.outer(ones, rows, groups)[:, 0]


def _activate(gate: Optional, up: Tensor) -> Tensor:
    return F.gelu(up) if gate is None else F.silu(gate).mul_(up)
