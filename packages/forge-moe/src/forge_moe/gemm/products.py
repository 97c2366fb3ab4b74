"""Ways to multiply sorted rows with a stack of matrices: a loop, one grouped kernel, one padded batch.

Each way is a pair: `multiply` rows with their expert's matrix, and the `outer` products of two sets of rows
summed within each expert (the gradient of the matrices). Both leave the tail undefined.

Shapes: R rows sorted by expert, E experts, M and N widths.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forge_moe._torch_compat import grouped_mm
from forge_moe.gemm.groups import Groups


class Products(NamedTuple):
    """multiply(x (R, M), w (E, M, N), groups) -> (R, N); outer(x (R, M), g (R, N), groups) -> (E, M, N), 0
    for an expert without rows. `on_host` says that `groups.sizes` is needed."""

    multiply: Callable[[Tensor, Tensor, Groups], Tensor]
    outer: Callable[[Tensor, Tensor, Groups], Tensor]
    on_host: bool


def _loop_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    assert groups.sizes is not None
    out = x.new_empty(x.size(0), w.size(2))
    begin = 0
    for matrix, size in zip(w.unbind(0), groups.sizes):
        if size:
            torch.mm(x.narrow(0, begin, size), matrix, out=out.narrow(0, begin, size))
        begin += size
    return out


def _loop_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    assert groups.sizes is not None
    out = x.new_empty(len(groups.sizes), x.size(1), g.size(1))
    begin = 0
    for matrix, size in zip(out.unbind(0), groups.sizes):
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
    """x as (E, C, M) with zeros, C the fullest expert's rows, and where each row went (R,)."""
    assert groups.sizes is not None
    fullest = max(groups.sizes, default=0)
    expert = groups.experts_of_rows(x.size(0))
    row = torch.arange(x.size(0), device=x.device)
    begin = groups.ends - groups.counts
    place = expert * fullest + (row - begin[expert])
    place = torch.where(row < groups.ends[-1], place, len(groups.sizes) * fullest)  # tail: the end
    out = x.new_zeros(len(groups.sizes) * fullest + 1, x.size(1))
    out.index_copy_(0, place, x)
    return out[:-1].view(len(groups.sizes), fullest, x.size(1)), place


def _batched_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    padded, place = _padded(x, groups)
    out = torch.bmm(padded, w).flatten(0, 1)  # (E C, N)
    if out.size(0) == 0:
        return x.new_zeros(x.size(0), w.size(2))
    return out.index_select(0, place.clamp_(max=out.size(0) - 1))


def _batched_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    left, _ = _padded(x, groups)
    right, _ = _padded(g, groups)
    return torch.bmm(left.transpose(1, 2), right)


def _shapes_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    return torch.mm(x, w[0])


def _shapes_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    return torch.mm(x.T, g).expand(groups.counts.numel(), -1, -1).contiguous()


LOOP = Products(_loop_multiply, _loop_outer, on_host=True)
GROUPED_MM = Products(_grouped_multiply, _grouped_outer, on_host=False)
BATCHED = Products(_batched_multiply, _batched_outer, on_host=True)
SHAPES = Products(_shapes_multiply, _shapes_outer, on_host=False)
"""For tensors without values (meta, fake): right shapes and FLOPs, no meaning."""
