"""The feed-forwards of all experts as one autograd function.

Shapes: R rows sorted by expert, E experts, D width, F width inside an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forge_moe.gemm.activations import Activation
from forge_moe.gemm.backends import GemmBackend
from forge_moe.gemm.groups import Groups

Optional = Tensor | None


class GroupedFeedForward(Function):
    """down(silu(gate(x)) * up(x)), or down(activation(up(x))) without a gate, by each row's own expert.

    One function, not a chain of ops, so that (1) the hidden rows (R, F) are not saved but recomputed from
    gate and up, (2) the tail beyond the groups is zeroed exactly twice, in the output and in the gradient
    of x, (3) gradients reach the kernels contiguous. Saves x, gate and up, R (D + 2 F) values; backward
    allocates 2 R F more. No second derivatives.
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
        backend: GemmBackend,
        activation: Activation,
    ) -> Tensor:
        gate = None if gate_w is None else _affine(x, gate_w, gate_b, groups, backend)  # (R, F)
        up = _affine(x, up_w, up_b, groups, backend)  # (R, F), or what the activation takes
        hidden = activation.forward(up) if gate is None else F.silu(gate).mul_(up)  # (R, F)
        out = _affine(hidden, down_w, down_b, groups, backend)  # (R, D)
        if not groups.full:
            # Not in place: selective recomputation caches the kernel's output and refuses a change of it.
            out = out.masked_fill(groups.tail(x.size(0)), 0.0)
        ctx.save_for_backward(x, gate, up, gate_w, up_w, down_w, groups.counts, groups.ends)
        ctx.host_sizes, ctx.full, ctx.backend = groups.host_sizes, groups.full, backend
        ctx.activation = activation
        ctx.has_bias = (gate_b is not None, up_b is not None, down_b is not None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional, ...]:
        x, gate, up, gate_w, up_w, down_w, counts, ends = ctx.saved_tensors
        groups, backend = Groups(counts, ends, ctx.host_sizes, ctx.full), ctx.backend
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        gate_bias, up_bias, down_bias = ctx.has_bias

        grad = grad.contiguous()
        act = None if gate is None else F.silu(gate)  # (R, F)
        hidden = ctx.activation.forward(up) if act is None else act * up  # (R, F)
        grad_down_w = backend.outer(hidden, grad, groups) if needs_down else None
        grad_down_b = _sum_rows(grad, groups, backend) if down_bias else None
        del hidden  # at most two buffers of (R, F) at a time
        grad_hidden = backend.multiply(grad, down_w.transpose(1, 2), groups)  # (R, F)
        backward = ctx.activation.backward
        grad_up = backward(grad_hidden, up) if act is None else act.mul_(grad_hidden)
        grad_up_w = backend.outer(x, grad_up, groups) if needs_up else None
        grad_up_b = _sum_rows(grad_up, groups, backend) if up_bias else None
        grad_x = backend.multiply(grad_up, up_w.transpose(1, 2), groups) if needs_x else None
        grad_gate_w = grad_gate_b = None
        if gate is not None:
            # In place: silu'(gate) times the gradient of silu(gate), in the buffer of grad_hidden.
            grad_hidden.mul_(up)
            grad_gate = torch.ops.aten.silu_backward.grad_input(
                grad_hidden, gate, grad_input=grad_hidden
            )
            grad_gate_w = backend.outer(x, grad_gate, groups) if needs_gate else None
            grad_gate_b = _sum_rows(grad_gate, groups, backend) if gate_bias else None
            if grad_x is not None:
                grad_x += backend.multiply(grad_gate, gate_w.transpose(1, 2), groups)
        if grad_x is not None and not groups.full:
            grad_x.masked_fill_(groups.tail(x.size(0)), 0.0)
        weights = (grad_gate_w, grad_up_w, grad_down_w)
        return (grad_x, *weights, grad_gate_b, grad_up_b, grad_down_b, None, None, None)


def _affine(x: Tensor, w: Tensor, b: Optional, groups: Groups, backend: GemmBackend) -> Tensor:
    out = backend.multiply(x, w, groups)
    if b is None:
        return out
    # In place on the rows of biases, not on the product, which selective recomputation may have cached.
    return b.index_select(0, groups.experts_of_rows(x.size(0))).add_(out)


def _sum_rows(rows: Tensor, groups: Groups, backend: GemmBackend) -> Tensor:
    """Sum of each expert's rows (E, N), by the same kernel: no atomics, so the same bits every time."""
    ones = rows.new_ones(rows.size(0), 8)  # 8 columns: kernels need rows of 16 bytes
    return backend.outer(ones, rows, groups)[:, 0]
