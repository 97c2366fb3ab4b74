"""Grouped GEMM: multiply rows that are sorted by expert with the matrices of their experts.

A backend is a pair of functions: `multiply` rows with their expert's matrix, and the `outer` products of two sets of rows
summed within each expert (the gradient of the matrices). Both leave the tail, rows of no expert, undefined.
`choose_backend` picks one by device, dtype and widths.

Shapes: R rows sorted by expert, E experts of this process, M and N widths.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_moe._registered import find_registered
from forge_moe._shared.problems import Problem, invalid, raise_problems
from forge_moe._torch_compat import grouped_mm, is_compiling_or_fake, scaled_grouped_mm

__all__ = ["GemmBackend", "Groups", "choose_backend", "find_backend"]

#: Names that `choose_backend` reads itself.
BUILT_IN = ("auto", "grouped_mm", "loop", "batched", "float8")


class Groups(NamedTuple):
    """Numbers of rows of each expert.

    counts (E,) int; ends (E,) int32, the end of each expert's rows; `host_sizes`, the counts on the host, for backends
    that loop there, else empty; `full`: the groups fill all R rows, there is no tail.
    """

    counts: Tensor
    ends: Tensor
    host_sizes: list[int]
    full: bool

    @staticmethod
    def of(counts: Tensor, *, host_sizes: bool, full: bool) -> "Groups":
        """Groups of `counts`. `host_sizes` costs one host sync on an accelerator."""
        ends = counts.cumsum(0, dtype=torch.int32)
        return Groups(counts, ends, counts.tolist() if host_sizes else [], full)

    def tail(self, num_rows: int) -> Tensor:
        """(R, 1) bool: rows of no expert."""
        return (torch.arange(num_rows, device=self.ends.device) >= self.ends[-1]).unsqueeze(1)

    def padded(self, num_rows: int) -> tuple["Groups", Tensor | None]:
        """Groups of as many rows as the fullest expert has, and the position of each row among them, without the tail.

        None if the rows lie there already: the groups are equal and have no tail. Reads `host_sizes`.
        """
        num, fullest = len(self.host_sizes), max(self.host_sizes, default=0)
        if num_rows == num * fullest and min(self.host_sizes, default=0) == fullest:
            return self._replace(full=True), None

        equal = torch.full_like(self.counts, fullest)
        ends = equal.cumsum(0, dtype=torch.int32)
        shift = (ends - equal) - (self.ends - self.counts)  # (E,)
        rows = torch.arange(sum(self.host_sizes), device=shift.device)
        position = rows + shift.repeat_interleave(self.counts, output_size=rows.numel())
        return Groups(equal, ends, [fullest] * num, full=True), position

    def experts_of_rows(self, num_rows: int) -> Tensor:
        """(R,) int64: the expert of each row; the last one for the tail."""
        rows = torch.arange(num_rows, device=self.ends.device, dtype=torch.int32)
        found = torch.searchsorted(self.ends, rows, right=True)
        return found.clamp_(max=self.ends.numel() - 1)


class GemmBackend(NamedTuple):
    """Two grouped matmuls.

    multiply(x (R, M), w (E, M, N), groups) -> (R, N); outer(x (R, M), g (R, N), groups) -> (E, M, N), 0 for an expert
    without rows. `needs_host_sizes`: both read `groups.host_sizes`. `padded`: both need equal groups without a tail, see
    `Groups.padded`.

    With `cast_rows` and `cast_matrices` `multiply` takes their results in place of x and w: rows are cast once for two
    matmuls, and the casts of matrices are kept while these do not change (`Casts`).
    """

    multiply: Callable[[Any, Any, Groups], Tensor]
    outer: Callable[[Tensor, Tensor, Groups], Tensor]
    needs_host_sizes: bool
    padded: bool = False
    cast_rows: Callable[[Tensor], Any] | None = None
    cast_matrices: Callable[[Tensor], Any] | None = None


class Casts:
    """Casts of one stack of matrices (E, M, N), and of its transpose, kept until `clear`."""

    def __init__(self) -> None:
        self.kept: dict[bool, Any] = {}

    def get(self, w: Tensor, transposed: bool, cast: Callable[[Tensor], Any]) -> Any:
        """`cast` of w, or of its transpose; made in the first call."""
        if transposed not in self.kept:
            self.kept[transposed] = cast(w.transpose(1, 2) if transposed else w)
        return self.kept[transposed]

    def clear(self) -> None:
        """Free the casts; the next `get` makes them again."""
        self.kept.clear()


def multiply(
    x: Any,
    w: Tensor,
    groups: Groups,
    backend: GemmBackend,
    casts: Casts | None,
    transposed: bool = False,
) -> Tensor:
    """Rows times their expert's matrix, or its transpose: `backend.multiply` with the kept casts of w (E, M, N).

    x (R, M), or what `backend.cast_rows` made of it.
    """
    if backend.cast_rows is not None and isinstance(x, Tensor):
        x = backend.cast_rows(x)
    if backend.cast_matrices is None or casts is None:
        w = w.transpose(1, 2) if transposed else w
        matrices = w if backend.cast_matrices is None else backend.cast_matrices(w)
    else:
        matrices = casts.get(w, transposed, backend.cast_matrices)
    return backend.multiply(x, matrices, groups)


@functools.cache
def find_backend(name: str) -> GemmBackend | None:
    """Find a backend of another package: an entry point of the group `forge.gemm_backends`, or "module:attribute".

    None for a built-in name. Raises ValueError for an unknown name, and for a path to anything but a GemmBackend.
    """
    found = find_registered("backend", name, "forge.gemm_backends", dict.fromkeys(BUILT_IN))
    if found is None or isinstance(found, GemmBackend):
        return found
    rule = f"must be a forge_moe.grouped_mm.GemmBackend, and is a {type(found).__name__}"
    raise invalid("backend", "type", name, rule, "make one from multiply and outer")


def choose_backend(
    name: str, x: Tensor, widths: tuple[int, ...], counts: Tensor | None = None
) -> GemmBackend:
    """Choose the backend for rows `x` and matrices of these widths.

    "auto" is, on a CPU, one batched matmul where that is faster for `counts` (E,). Else it is `grouped_mm` where its
    kernel runs: bf16 (on CPUs also fp32 and fp16), widths a multiple of 16 bytes, fp32
    not under torch.compile. Elsewhere it is the loop, which on an accelerator costs one host sync per layer, and under
    torch.compile and torch.export, as a custom operator, one per matmul. "float8" is torch's scaled kernel on a GPU and
    an emulation elsewhere. A backend chosen by name, of ours or found by `find_backend`, is used or raises ValueError; it
    is never replaced.
    """
    if name == "auto" and counts is not None and x.device.type == "cpu":
        # On a CPU the counts are read without a wait.
        on_host = not is_compiling_or_fake(x)
        if on_host and batch_is_faster(counts.tolist(), x, widths):
            return BATCHED

    obstacle = _obstacle(x, widths)
    if name == "auto":
        name = "grouped_mm" if obstacle is None else "loop"
    elif name == "grouped_mm" and obstacle is not None and not x.is_meta:
        raise_problems("", [obstacle])

    if name != "grouped_mm" and is_compiling_or_fake(x) and not torch.compiler.is_compiling():
        return SHAPES_ONLY
    if name == "float8":
        return _float8(x, widths)
    loop = CUSTOM_OPS if torch.compiler.is_compiling() else LOOP
    chosen = {"grouped_mm": GROUPED_MM, "loop": loop, "batched": BATCHED}.get(name)
    if chosen is None:
        chosen = find_backend(name)
        assert chosen is not None, "a built-in name was returned above"
    return chosen


def _obstacle(x: Tensor, widths: tuple[int, ...]) -> Problem | None:
    """The reason why the grouped kernel cannot multiply `x`, or None."""
    step = 16 // x.element_size()
    if grouped_mm is None:
        code, rule = "requires", "needs grouped_mm, which this torch lacks"
    elif x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        code, rule = "dtype", f"supports bf16, fp16 and fp32, not {x.dtype}"
    elif x.dtype != torch.bfloat16 and (x.device.type != "cpu" or is_compiling_or_fake(x)):
        where = f"on {x.device.type} or under torch.compile"
        code, rule = "compile", f"supports only bf16 {where}, not {x.dtype}"
    elif any(width % step for width in widths):
        needed = f"needs widths that are multiples of {step} in {x.dtype}"
        code, rule = "widths", f"{needed}, and they are {widths}"
    else:
        return None
    return Problem("backend", code, "grouped_mm", rule, "use backend = 'auto' or 'loop'")


def _float8(x: Tensor, widths: tuple[int, ...]) -> GemmBackend:
    if x.device.type != "cuda":
        return EMULATED
    if x.dtype != torch.bfloat16 or any(width % 16 for width in widths):
        rule = f"needs bf16 rows and widths that are multiples of 16, not {x.dtype} and {widths}"
        fix = "use precision bf16, or backend = 'auto'"
        raise invalid("backend", "precision", "float8", rule, fix)
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        device = torch.cuda.get_device_name(x.device)
        rule = f"needs a GPU of capability 9.0 (H100) or later, and this is {device}"
        raise invalid("backend", "device", "float8", rule, "use backend = 'auto'")
    return SCALED


# ---- one grouped kernel


def _grouped_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    assert grouped_mm is not None
    if x.size(0) == 0:  # the kernel rejects the strides of empty tensors
        return x.new_empty(0, w.size(2))
    return grouped_mm(x, w, offs=groups.ends)


def _grouped_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    assert grouped_mm is not None
    if x.size(0) == 0:
        return x.new_zeros(groups.ends.numel(), x.size(1), g.size(1))
    return grouped_mm(x.T, g, offs=groups.ends)


GROUPED_MM = GemmBackend(_grouped_multiply, _grouped_outer, needs_host_sizes=False)


# ---- a loop over experts


def _loop_multiply(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    out = x.new_empty(x.size(0), w.size(2))
    begin = 0
    for matrix, size in zip(w.unbind(0), groups.host_sizes):
        if size:
            torch.mm(x.narrow(0, begin, size), matrix, out=out.narrow(0, begin, size))
        begin += size
    return out


def _loop_outer(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    out = x.new_empty(len(groups.host_sizes), x.size(1), g.size(1))
    begin = 0
    for matrix, size in zip(out.unbind(0), groups.host_sizes):
        # Without rows the matmul is a sum over nothing, exactly 0.
        torch.mm(x.narrow(0, begin, size).T, g.narrow(0, begin, size), out=matrix)
        begin += size
    return out


LOOP = GemmBackend(_loop_multiply, _loop_outer, needs_host_sizes=True)


# The same loop as custom operators, opaque to torch.compile and torch.export: the number of rows of an expert is known
# when the graph runs, not when it is traced, and a loop over these numbers would break the graph. The operators read
# them from the device, once per matmul.


@torch.library.custom_op("forge_moe::grouped_multiply", mutates_args=())
def _multiply_op(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return LOOP.multiply(x, w, Groups.of(counts, host_sizes=True, full=False))


@_multiply_op.register_fake
def _(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.size(0), w.size(2))


@torch.library.custom_op("forge_moe::grouped_outer", mutates_args=())
def _outer_op(x: Tensor, g: Tensor, counts: Tensor) -> Tensor:
    return LOOP.outer(x, g, Groups.of(counts, host_sizes=True, full=False))


@_outer_op.register_fake
def _(x: Tensor, g: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.size(0), x.size(1), g.size(1))


CUSTOM_OPS = GemmBackend(
    lambda x, w, groups: _multiply_op(x, w, groups.counts),
    lambda x, g, groups: _outer_op(x, g, groups.counts),
    needs_host_sizes=False,
)


# ---- one padded batch


def batch_is_faster(sizes: list[int], x: Tensor, widths: tuple[int, ...]) -> bool:
    """Whether a CPU multiplies groups of these sizes faster as one batch, filled up to the largest group.

    Measured with torch 2.13 on one thread of an AMD EPYC: a matmul of its own costs an expert with rows 12 us in bf16 and
    2 us in fp32, and a layer has nine. A batch costs four copies of the rows, and the matmuls of the padding, at about 160
    and 40 multiplications per ns.
    """
    fullest, num_rows = max(sizes, default=0), sum(sizes)
    padding = fullest * len(sizes) - num_rows
    if not padding:
        return True  # nothing is copied
    small, few = (2**16, 2**21) if x.element_size() == 2 else (2**13, 2**16)
    matmuls = sum(size > 0 for size in sizes)
    return fullest * sum(widths) <= small and padding * math.prod(widths) <= few * matmuls


def pad_rows(x: Tensor, position: Tensor | None, groups: Groups) -> Tensor:
    """Rows (R, M) at their positions among the `Groups.padded`, and zeros elsewhere: (E C, M)."""
    if position is None:
        return x
    out = x.new_zeros(sum(groups.host_sizes), x.size(1))
    return out.index_copy_(0, position, x.narrow(0, 0, position.numel()))


def unpad_rows(x: Tensor, position: Tensor | None, num_rows: int) -> Tensor:
    """The reverse of `pad_rows`: (E C, M) -> (R, M), zeros in the tail."""
    if position is None:
        return x
    rows = x.index_select(0, position)
    tail = num_rows - position.numel()
    return torch.cat((rows, x.new_zeros(tail, x.size(1)))) if tail else rows


def _batch(x: Tensor, groups: Groups) -> Tensor:
    return x.reshape(len(groups.host_sizes), groups.host_sizes[0], x.size(1))  # (E, C, M)


BATCHED = GemmBackend(
    lambda x, w, groups: torch.bmm(_batch(x, groups), w).flatten(0, 1),
    lambda x, g, groups: torch.bmm(_batch(x, groups).transpose(1, 2), _batch(g, groups)),
    needs_host_sizes=True,
    padded=True,
)


# ---- shapes without values


def _outer_shapes(x: Tensor, g: Tensor, groups: Groups) -> Tensor:
    return torch.mm(x.T, g).expand(groups.counts.numel(), -1, -1).contiguous()


SHAPES_ONLY = GemmBackend(
    lambda x, w, groups: torch.mm(x, w[0]), _outer_shapes, needs_host_sizes=False
)
"""For tensors without values (meta, fake): the shapes and FLOPs of the others."""


# ---- float8
#
# Rows and matrices are rounded to e4m3 with one fp32 scale per row and per column. Both operands are rounded along their
# contraction, so each element of the result has one pair of scales. Forward and the gradient of the rows multiply float8
# by float8; the gradient of a matrix stays in the input dtype, as in torchao's recipe `rowwise_with_gw_hp`. e4m3 has 3
# bits of mantissa: elements are rounded by at most 2^-4 of themselves.

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Float8(NamedTuple):
    """A tensor of `dtype` as e4m3 values times fp32 scales, of size 1 along the contraction."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype


def to_float8(x: Tensor, dim: int) -> Float8:
    """Round x to e4m3 with a scale for each slice along `dim`."""
    wide = x.float() if x.dtype == torch.float64 else x
    # A pass that reads, one that divides in fp32, one that rounds: x is not copied to fp32 before.
    largest = torch.linalg.vector_norm(wide.detach(), math.inf, dim=dim, keepdim=True).float()
    scale = largest.clamp_min(1e-12) / _LARGEST
    return Float8(wide.div(scale).to(torch.float8_e4m3fn), scale, x.dtype)


def _cast_rows(x: Tensor) -> Float8:
    return to_float8(x, dim=1)


def _cast_matrices(w: Tensor) -> Float8:
    return to_float8(w, dim=1)  # scales (E, 1, N)


def _cast_columns(w: Tensor) -> Float8:
    found = to_float8(w, dim=1)
    # The kernel needs the right factor column-major: the transposed view of contiguous (E, N, M).
    return found._replace(values=found.values.transpose(1, 2).contiguous().transpose(1, 2))


def _scaled_multiply(x: Float8, w: Float8, groups: Groups) -> Tensor:
    scales = x.scale.squeeze(1), w.scale.squeeze(1)
    options = {"offs": groups.ends, "out_dtype": torch.bfloat16}
    return scaled_grouped_mm(x.values, w.values, *scales, **options)


def _emulated_multiply(x: Float8, w: Float8, groups: Groups) -> Tensor:
    matrices = w.values.float() * w.scale  # exact up to one fp32 rounding
    return (LOOP.multiply(x.values.float(), matrices, groups) * x.scale).to(x.dtype)


SCALED = GemmBackend(_scaled_multiply, GROUPED_MM.outer, False, False, _cast_rows, _cast_columns)
EMULATED = GemmBackend(_emulated_multiply, LOOP.outer, True, False, _cast_rows, _cast_matrices)
"""The same rounding with fp32 matmuls, for devices without the kernel: a reference, not a speed-up."""
