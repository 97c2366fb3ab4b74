"""Float8 experts: rows and matrices in e4m3 with row and column scales, gradients of matrices unquantized.

Forward and the gradient of rows multiply float8 by float8, with one fp32 scale per row and per column (both
operands are rounded along their contraction, so each element of the product has one pair of scales);
the gradient of a matrix stays in the input dtype, as in torchao's recipe `rowwise_with_gw_hp`. Elements are
rounded by at most 2^-4 of themselves.

Shapes: R rows sorted by expert, E experts, M and N widths.
"""

import torch
from torch import Tensor

from forge_moe._torch_compat import scaled_grouped_mm
from forge_moe.gemm.backends import GROUPED_MM, LOOP, GemmBackend
from forge_moe.gemm.groups import Groups

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def to_float8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """x as (float8 e4m3 values, fp32 scales with size 1 in `dim`): x is approximately values times scales."""
    largest = x.detach().abs().amax(dim=dim, keepdim=True).float()
    scale = largest.clamp_min(1e-12) / _LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _scaled_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    values, scale = to_float8(x, dim=1)
    w_values, w_scale = to_float8(w.transpose(1, 2).contiguous(), dim=2)  # (E, N, M)
    # The kernel needs the right factor column-major: the transposed view of contiguous (E, N, M).
    return scaled_grouped_mm(
        values,
        w_values.transpose(1, 2),
        scale.squeeze(1),
        w_scale.squeeze(2),
        offs=groups.ends,
        out_dtype=torch.bfloat16,
    )


def _emulated_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    values, scale = to_float8(x, dim=1)
    w_values, w_scale = to_float8(w, dim=1)
    scaled = w_values.float() * w_scale  # exact up to one fp32 rounding
    return (LOOP.multiply(values.float(), scaled, groups) * scale).to(x.dtype)


SCALED = GemmBackend(_scaled_multiply, GROUPED_MM.outer, needs_host_sizes=False)
EMULATED = GemmBackend(_emulated_multiply, LOOP.outer, needs_host_sizes=True)
"""The same rounding with fp32 products, for devices without the kernel: a reference, not a speed-up."""
