"""Orthogonalise matrices by a quintic Newton-Schulz iteration, many of one shape at a time."""

from __future__ import annotations

import torch
from torch import Tensor

#: Chosen by Keller Jordan for the steepest slope at zero: singular values land in about 0.7 to 1.2, not at 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
#: Elements of one batch at most, where a matrix has fewer: bounds the copies of an iteration to 3 x 64 MiB in bf16.
_BATCH = 2**25
#: Rows of a block of a symmetric product on a CPU.
_BLOCK = 128


def orthogonalise(matrices: list[Tensor], steps: int, dtype: torch.dtype) -> list[Tensor]:
    """U V^T, roughly, of each matrix U S V^T: singular values become nearly one, directions stay.

        orthogonalise([torch.randn(64, 256)], steps=5, dtype=torch.float32)

    Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024). Any shapes (R, C); the results
    have these shapes and `dtype`, in which all of it is computed. A zero matrix stays zero. Matrices of
    one shape, or its transpose, share batched products: 3 of them per step and shape.

    Cost: 2 m^2 (2 n + m) FLOPs per step for sides m <= n; memory of four times a batch.
    """
    batches: dict[tuple[int, int], list[int]] = {}
    for i, matrix in enumerate(matrices):
        batches.setdefault((min(matrix.shape), max(matrix.shape)), []).append(i)
    found: dict[int, Tensor] = {}
    for (m, n), members in batches.items():
        size = max(1, _BATCH // max(1, m * n))
        for first in range(0, len(members), size):
            some = members[first : first + size]
            wide = torch.stack([_wide(matrices[i]).to(dtype) for i in some])  # (B, m, n)
            for i, result in zip(some, iterate(wide, steps).unbind()):
                found[i] = result if matrices[i].shape == result.shape else result.mT
    return [found[i] for i in range(len(matrices))]


def iterate(x: Tensor, steps: int) -> Tensor:
    """(B, m, n) with m <= n, over their Frobenius norms, through `steps` of a X + b (X X^T) X + c (X X^T)^2 X."""
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = _symmetric(x, x.mT)  # (B, m, m)
        factor = _symmetric(gram, gram, gram)
        x = torch.baddbmm(x, factor, x, beta=_A)
    return x


def _symmetric(a: Tensor, b: Tensor, gram: Tensor | None = None) -> Tensor:
    """a @ b, or with a Gram matrix b gram + c a @ b of the iteration; (B, m, m), known to be symmetric.

    On a CPU, where products are all the time, the blocks on and below the diagonal alone, mirrored: from half (many
    blocks) to all (one) of the FLOPs.
    """
    if a.device.type != "cpu" or a.size(1) <= _BLOCK:
        return a @ b if gram is None else torch.baddbmm(gram, a, b, beta=_B, alpha=_C)
    out = a.new_empty(len(a), a.size(1), a.size(1))
    for i, whole in enumerate(out):  # one by one: batches of strided blocks would be copied
        for start in range(0, len(whole), _BLOCK):
            rows, end = slice(start, start + _BLOCK), start + _BLOCK
            left, right = a[i, rows], b[i, :, :end]
            if gram is None:
                block = left @ right
            else:
                block = torch.addmm(gram[i, rows, :end], left, right, beta=_B, alpha=_C)
            whole[rows, :end] = block
            whole[:start, rows] = block[:, :start].mT
    return out


def flops(rows: int, columns: int) -> int:
    """Of one step for a matrix of this shape."""
    m, n = min(rows, columns), max(rows, columns)
    return 2 * m * m * (2 * n + m)


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
