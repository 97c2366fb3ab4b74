"""Backends of the grouped GEMM: a loop, one grouped kernel, one padded batch.

Each is a pair: `multiply` rows with their expert's matrix, and the `outer` products of two sets of rows
summed within each expert (the gradient of the matrices). Both leave the tail undefined.

Shapes: R rows sorted by expert, E experts, M and N widths.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forge_moe._torch_compat import grouped_mm
from forge_moe.gemm.groups import Groups


class GemmBackend(NamedTuple):
    """multiply(x (R, M), w (E, M, N), groups) -> (R, N); outer(x (R, M), g (R, N), groups) -> (E, M, N), 0
    for an expert without rows. `needs_host_sizes`: both read `groups.host_sizes`."""

    multiply: Callable[[Tensor, Tensor, Groups], Tensor]
    outer: Callable[[Tensor, Tensor, Groups], Tensor]
    needs_host_sizes: bool


def _loop_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    assert groups.host_sizes is not None
    out = x.new_empty(x.size(0), w.size(2))
    begin = 0
    for matrix, size in zip(w.unbind(0), groups.host_sizes):
        if size:
            torch.mm(x.narrow(0, begin, size), matrix, out=out.narrow(0, begin, size))
        begin += size
    return out


def _loop_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    assert groups.host_sizes is not None
    out = x.new_empty(len(groups.host_sizes), x.size(1), g.size(1))
    begin = 0
    for matrix, size in zip(out.unbind(0), groups.host_sizes):
        if size:
            torch.mm(x.narrow(0, begin, size).T, g.narrow(0, begin, size), out=matrix)
        else:
            matrix.zero_()
        begin += size
    return out


def _grouped_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    assert grouped_mm is not None
    if x.size(0) == 0:  # the kernel refuses the strides of empty tensors
        return x.new_empty(0, w.size(2))
    return grouped_mm(x, w, offs=groups.ends)


def _grouped_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    assert grouped_mm is not None
    if x.size(0) == 0:
        return x.new_zeros(groups.ends.numel(), x.size(1), g.size(1))
    return grouped_mm(x.T, g, offs=groups.ends)


def _padded(x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """x as (E, C, M) padded with zeros, C the rows of the fullest expert, and the position of each row (R,)."""
    assert groups.host_sizes is not None
    fullest = max(groups.host_sizes, default=0)
    expert = groups.experts_of_rows(x.size(0))
    row = torch.arange(x.size(0), device=x.device)
    begin = groups.ends - groups.counts
    position = expert * fullest + (row - begin[expert])
    # Rows of the tail all go to one spare row at the end, which is cut off.
    position = torch.where(row < groups.ends[-1], position, len(groups.host_sizes) * fullest)
    out = x.new_zeros(len(groups.host_sizes) * fullest + 1, x.size(1))
    out.index_copy_(0, position, x)
    return out[:-1].view(len(groups.host_sizes), fullest, x.size(1)), position


def _batched_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    padded, position = _padded(x, groups)
    out = torch.bmm(padded, w).flatten(0, 1)  # (E C, N)
    if out.size(0) == 0:
        return x.new_zeros(x.size(0), w.size(2))
    return out.index_select(0, position.clamp_(max=out.size(0) - 1))


def _batched_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    left, _ = _padded(x, groups)
    right, _ = _padded(g, groups)
    return torch.bmm(left.transpose(1, 2), right)


def _shapes_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    return torch.mm(x, w[0])


def _shapes_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    return torch.mm(x.T, g).expand(groups.counts.numel(), -1, -1).contiguous()


LOOP = GemmBackend(_loop_multiply, _loop_outer, needs_host_sizes=True)
GROUPED_MM = GemmBackend(_grouped_multiply, _grouped_outer, needs_host_sizes=False)
BATCHED = GemmBackend(_batched_multiply, _batched_outer, needs_host_sizes=True)
SHAPES_ONLY = GemmBackend(_shapes_multiply, _shapes_outer, needs_host_sizes=False)
"""For tensors without values (meta, fake): the shapes and FLOPs of the others."""
