"""Collectives over one mesh axis as functions of a tensor, each with its own gradient.

Shapes: (..., tokens, width); `dim` is the dim that is sharded or gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel._shared.problems import invalid, raise_problems
from forge_parallel._torch_compat import all_gather, all_reduce, function_output, reduce_scatter
from forge_parallel.rules import uneven_sequence


class NamedGroup(NamedTuple):
    """A process group by its name, which compiled graphs can hold, with its size and this process's rank in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, axis: Any) -> NamedGroup:
        """Of a DeviceMesh of one axis, or of anything with `.group`, `.size` and `.rank`."""
        if hasattr(axis, "get_group"):
            if axis.ndim != 1:
                fix = "pass mesh['tp']"
                raise invalid("mesh", "axes", axis.mesh_dim_names, "must have one axis", fix)
            return cls(axis.get_group().group_name, axis.size(), axis.get_local_rank())
        return cls("" if axis.group is None else axis.group.group_name, axis.size, axis.rank)

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, (size, ...), without a gradient."""
        return all_gather(x, self.size, self.name).view(self.size, *x.shape)


_Transfer = Callable[[Tensor, NamedGroup, int], Tensor]


def copy(x: Tensor, group: NamedGroup) -> Tensor:
    """x itself; all-reduce of its gradient in backward."""
    return _collective(x, group, 0, _identity, _all_reduce)


def reduce(x: Tensor, group: NamedGroup) -> Tensor:
    """The sum of x over ranks: all-reduce; the gradient, equal on all ranks, is passed on."""
    return _collective(x, group, 0, _all_reduce, _identity)


def gather(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    """Concatenate the shards of all ranks along dim: all-gather; reduce-scatter of the gradients in backward."""
    return _collective(x, group, dim, _all_gather, _reduce_scatter)


def scatter(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    """This rank's shard of the sum of x over ranks: reduce-scatter, all-gather in backward."""
    return _collective(x, group, dim, _reduce_scatter, _all_gather)


def split(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    """This rank's shard of a replicated x: sends nothing; all-gather in backward."""
    return _collective(x, group, dim, _split, _all_gather)


def gather_replicated(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    """Concatenate the shards of all ranks along dim: all-gather. For use that is equal on all ranks: the gradient is
    replicated, too, and backward takes this rank's shard of it, sending nothing."""
    return _collective(x, group, dim, _all_gather, _split)


def token_dim(x: Tensor) -> int:
    """1 of (B, S, D), 0 of (T, D)."""
    return max(x.dim() - 2, 0)


def _collective(
    x: Tensor, group: NamedGroup, dim: int, there: _Transfer, back: _Transfer
) -> Tensor:
    """Transfer x by `there`, and its gradient by `back`; x itself on one rank."""
    if group.size == 1:
        return x
    out: Tensor = _Collective.apply(x, group, dim, there, back)
    return out


class _Collective(torch.autograd.Function):
    """One transfer in forward, another in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: NamedGroup, dim: int, there: _Transfer, back: _Transfer
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return function_output(there(x, group, dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad, ctx.group, ctx.dim), None, None, None, None


def _identity(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    return all_reduce(x, group.name)


def _all_gather(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    full = all_gather(x, group.size, group.name)  # shards one after another on dim 0
    if dim == 0:
        return full
    if x.shape[:dim].numel() == 1 and not torch.compiler.is_compiling():
        # a view: with one sequence, shards on dim 0 are in order
        return full.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(full.chunk(group.size), dim)  # the form that async tp looks for


def _reduce_scatter(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    _check_divides(x.shape, dim, group.size)
    if dim and (x.shape[:dim].numel() > 1 or torch.compiler.is_compiling()):
        return reduce_scatter(torch.cat(x.chunk(group.size, dim)), group.size, group.name)
    shape = (*x.shape[:dim], x.size(dim) // group.size, *x.shape[dim + 1 :])
    return reduce_scatter(x.flatten(0, dim), group.size, group.name).view(shape)


def _split(x: Tensor, group: NamedGroup, dim: int) -> Tensor:
    _check_divides(x.shape, dim, group.size)
    return x.chunk(group.size, dim)[group.rank].contiguous()


def _check_divides(shape: torch.Size, dim: int, size: int) -> None:
    """ValueError unless the tokens of (..., tokens, width) divide over the ranks."""
    if shape[dim] % size:  # compiled code traces no more than this line
        wrong = uneven_sequence(shape[dim], tp=size, names={"seq_len": f"dim {dim}"})
        assert wrong is not None
        rule = f"of {tuple(shape)}, its tokens, {wrong.rule}"
        fix = f"{wrong.fix}, or sequence_parallel = false and no experts"
        raise_problems("", [replace(wrong, rule=rule, fix=fix)])
