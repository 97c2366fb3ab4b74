"""The loop over experts as two custom operators, opaque to torch.compile and torch.export.

The number of rows of an expert is known when the graph runs, not when it is traced: a loop over these
numbers would break the graph. The operators read them from the device, once per product.

Shapes: R rows sorted by expert, E experts, M and N widths.
"""

import torch
from torch import Tensor

from forge_moe.gemm.backends import LOOP, GemmBackend
from forge_moe.gemm.groups import Groups


@torch.library.custom_op("forge_moe::grouped_multiply", mutates_args=())
def _multiply(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return LOOP.multiply(x, w, Groups.of(counts, host_sizes=True, full=False))


@_multiply.register_fake
def _(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.size(0), w.size(2))


@torch.library.custom_op("forge_moe::grouped_outer", mutates_args=())
def _outer(x: Tensor, g: Tensor, counts: Tensor) -> Tensor:
    return LOOP.outer(x, g, Groups.of(counts, host_sizes=True, full=False))


@_outer.register_fake
def _(x: Tensor, g: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.size(0), x.size(1), g.size(1))


CUSTOM_OPS = GemmBackend(
    lambda x, w, groups: _multiply(x, w, groups.counts),
    lambda x, g, groups: _outer(x, g, groups.counts),
    needs_host_sizes=False,
)
