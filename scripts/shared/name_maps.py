"""Tensors are renamed and reshaped by a name map, one at a time, bit-exact in both directions.

Shape legend: H heads, D head dimension, R the remaining dims of a weight, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .name_rows import CompiledRow, Op, Part, Row, check_rows, fill
from .problems import ProblemError, invalid, problems_of

_NAME = ""  # of a problem, until the tensor is known
Pieces = dict[tuple[int | None, int], Tensor]  # (expert, position in the row's names) -> tensor


def to_forge(
    rows: Sequence[Row], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Rename and reshape Hugging Face tensors into ours.

    Usage: ``state = dict(to_forge(rows, safetensors_items))``. A tensor is yielded as soon as it has
    all parts; only the parts of incomplete tensors are in memory. A rename yields the same tensor;
    any operation makes a contiguous one.

    Raises ValueError with the name, for a name that no row or more than one row matches, a name that
    occurs twice, parts whose shapes do not fit, and parts that are missing at the end.
    """
    return _stream(check_rows(rows), tensors, inward=True)


def to_hf(
    rows: Sequence[Row], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The inverse: ``to_hf(rows, to_forge(rows, x))`` gives the names and bits of ``x``.

    Each tensor is yielded at once as its one or more Hugging Face tensors, which own their memory
    (safetensors refuses views of one storage), but those that a split made, which wait for one another. Raises ValueError as :func:`to_forge` does.
    """
    return _stream(check_rows(rows), tensors, inward=False)


def _stream(
    rows: tuple[CompiledRow, ...], tensors: Iterable[tuple[str, Tensor]], *, inward: bool
) -> Iterator[tuple[str, Tensor]]:
    """Tensors through the rows: a row joins parts on the way in, a split on the way out; the other way they part."""
    gather, done = _Gather(), set[str]()
    for name, tensor in tensors:
        row, part = _match(
            name,
            rows,
            lambda row: row.hf_regexes if row.split != inward else (row.forge_regex,),
        )
        if row.split != inward:
            joined = gather.take(name, tensor, row, part)
            if joined is not None:
                yield joined
            del tensor, joined  # or they would live while the next tensor is made
            continue

        if name in done:
            raise invalid(name, "duplicate", ..., "came twice", "give each tensor once")
        done.add(name)
        pieces = _views(name, tensor, row)
        for target, part_name in row.hf_names(part.layer, part.expert).items():
            view = pieces[_key(target, row)]
            yield part_name, view.clone(memory_format=torch.contiguous_format) if row.ops else view
        del tensor, pieces, view
    gather.finish()


class _Gather:
    """Parts that wait for the others of their tensor."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[dict[Part, str], dict[Part, Tensor]]] = {}
        self.done: set[str] = set()

    def take(
        self, name: str, tensor: Tensor, row: CompiledRow, part: Part
    ) -> tuple[str, Tensor] | None:
        """The name and the tensor that this part makes whole, or None."""
        stacked = row.experts is not None
        target = fill(row.forge, part.layer, part.expert)
        if target in self.done or part in self.waiting.get(target, ({}, {}))[1]:
            fix = "give each tensor once"
            raise invalid(name, "repeated", ..., f"came twice (for {target})", fix)
        expert = None if stacked else part.expert
        wanted, parts = self.waiting.setdefault(target, (row.hf_names(part.layer, expert), {}))
        if part not in wanted:
            rule = f"is an expert beyond the {row.experts} of stack_experts"
            raise invalid(name, "expert", part.expert, rule, "fix stack_experts")

        parts[part] = tensor
        if len(parts) < len(wanted):
            return None
        del self.waiting[target]
        self.done.add(target)
        pieces = {_key(piece, row): t for piece, t in parts.items()}
        return target, _forward(target, pieces, row.ops)

    def finish(self) -> None:
        """ValueError with the first tensor that lacks a part."""
        if not self.waiting:
            return
        target, (wanted, parts) = next(iter(self.waiting.items()))
        missing = [name for part, name in wanted.items() if part not in parts]
        rule = f"are missing ({len(missing)} in all; {len(self.waiting)} unfinished tensors)"
        fix = "give all files, or the map of this model"
        raise invalid(target, "missing", missing[:4], rule, fix)


def assemble(
    name: str, like: Tensor, rows: tuple[CompiledRow, ...], read: Callable[[str], Tensor]
) -> Tensor:
    """The tensor of Forge's ``name``, of the shape and dtype of ``like``, from parts that ``read`` gives.

    Each part is copied to its place as it is read: memory is the tensor and one part; or, of a split, the whole
    that it is a part of.
    """
    row, part = _match(name, rows, lambda row: row.hf_regexes if row.split else (row.forge_regex,))
    if row.split:
        whole_name = fill(row.forge, part.layer, part.expert)
        view = _views(whole_name, read(whole_name), row)[_key(part, row)]
        return view.clone(memory_format=torch.contiguous_format)
    names = row.hf_names(part.layer, part.expert)
    if not row.ops:
        return read(names[part])

    if any(op[0] == "rope_permute" for op in row.ops):  # its parts are no views of the tensor
        parts = {_key(piece, row): read(hf_name) for piece, hf_name in names.items()}
        return _forward(name, parts, row.ops)
    whole = torch.empty(like.shape, dtype=like.dtype)
    views = _views(name, whole, row)
    for piece, hf_name in names.items():
        views[_key(piece, row)].copy_(read(hf_name))
    return whole


def _match(
    name: str,
    rows: tuple[CompiledRow, ...],
    regexes: Callable[[CompiledRow], tuple[re.Pattern[str], ...]],
) -> tuple[CompiledRow, Part]:
    hits: list[tuple[CompiledRow, Part]] = []
    for row in rows:
        for position, regex in enumerate(regexes(row)):
            if found := regex.fullmatch(name):
                numbers = {key: int(value) for key, value in found.groupdict().items()}
                hits.append((row, Part(numbers.get("i"), numbers.get("e"), position)))
    if not hits:
        fix = "add a row or use another map"
        raise invalid(name, "unknown", ..., "matches nothing in the map", fix)
    if len(hits) > 1:
        both = "; ".join(f"{', '.join(row.hf)} -> {row.forge}" for row, _ in hits)
        rule = f"rows match ({both})"
        raise invalid(name, "ambiguous", len(hits), rule, "make the patterns disjoint")
    return hits[0]


def _forward(name: str, pieces: Pieces, ops: tuple[Op, ...]) -> Tensor:
    try:
        for op in ops:
            if op[0] == "concat":
                pieces = _concat(pieces, op[1], op[2])
            elif op[0] == "stack_experts":
                positions = sorted({position for _, position in pieces})
                pieces = {
                    (None, p): torch.stack([pieces[e, p] for e in range(op[1])])  # (E, R)
                    for p in positions
                }
            else:
                pieces = {key: _single(op, value, inverse=False) for key, value in pieces.items()}
    except (RuntimeError, IndexError, ValueError) as error:
        raise _unfit(error, name, f"cannot apply {op}") from error

    tensor = pieces[None, 0]
    return tensor.contiguous() if ops else tensor


def _key(part: Part, row: CompiledRow) -> tuple[int | None, int]:
    """The piece that ``part`` is of the tensor it belongs to."""
    return (part.expert if row.experts is not None else None, part.position)


def _views(name: str, tensor: Tensor, row: CompiledRow) -> Pieces:
    """The Hugging Face tensors that make up ``tensor``: views of it, unless a rope_permute copies."""
    pieces: Pieces = {(None, 0): tensor}
    try:
        for op in reversed(row.ops):
            if op[0] == "concat":
                pieces = {
                    (e, p): part
                    for (e, _), value in pieces.items()
                    for p, part in enumerate(_split(value, op[1], op[2]))
                }

            elif op[0] == "stack_experts":
                pieces = {
                    (e, p): part
                    for (_, p), value in pieces.items()
                    for e, part in enumerate(_unstack(value, op[1]))
                }
            else:
                pieces = {key: _single(op, value, inverse=True) for key, value in pieces.items()}
    except (RuntimeError, IndexError, ValueError) as error:
        raise _unfit(error, name, f"cannot undo {op}") from error
    return pieces


def _unfit(error: Exception, name: str, where: str) -> ProblemError:
    return ProblemError([problem.under(name) for problem in problems_of(error)], where)


def _concat(pieces: Pieces, dim: int, sizes: int | tuple[int, ...]) -> Pieces:
    count = sizes if isinstance(sizes, int) else len(sizes)
    joined: Pieces = {}
    for expert in dict.fromkeys(e for e, _ in pieces):
        parts = [pieces[expert, p] for p in range(count)]
        found = tuple(part.size(dim) for part in parts)
        wanted = (found[0],) * count if isinstance(sizes, int) else sizes
        if found != wanted or len({part.dtype for part in parts}) > 1:
            dtypes = ", ".join(str(part.dtype) for part in parts)
            rule = f"are sizes ({dtypes}), which must be {wanted} of one dtype"
            raise invalid(_NAME, "sizes", found, rule)
        joined[expert, 0] = torch.cat(parts, dim)
    return joined


def _split(value: Tensor, dim: int, sizes: int | tuple[int, ...]) -> Sequence[Tensor]:
    if isinstance(sizes, int):
        if value.size(dim) % sizes:
            rule = f"is a shape whose dim {dim} must be divisible by {sizes}"
            raise invalid(_NAME, "divides", tuple(value.shape), rule)
        sizes = (value.size(dim) // sizes,) * sizes
    return value.split(list(sizes), dim)


def _unstack(value: Tensor, count: int) -> Sequence[Tensor]:
    if value.size(0) != count:
        raise invalid(_NAME, "experts", tuple(value.shape), f"must have {count} as its dim 0")
    return value.unbind(0)


def _single(op: Op, value: Tensor, *, inverse: bool) -> Tensor:
    if op[0] == "transpose":
        return value.transpose(op[1], op[2])
    return _rope_permute(value, op[1], inverse=inverse)


def _rope_permute(weight: Tensor, num_heads: int, *, inverse: bool) -> Tensor:
    """Rows of a projection from halves (rotate-half, Hugging Face) to pairs (2k, 2k+1), and back.

    Llama's published weights rotate neighboring rows, their Hugging Face version row k with row
    k + D/2; see ``convert_llama_weights_to_hf.py`` in transformers for the same permutation.
    """
    rows, rest = weight.size(0), weight.shape[1:]
    if rows % (2 * num_heads):
        raise invalid(_NAME, "heads", rows, f"rows are not {num_heads} heads of an even dimension")
    half = rows // num_heads // 2
    shape = (num_heads, half, 2, *rest) if inverse else (num_heads, 2, half, *rest)
    return weight.reshape(shape).transpose(1, 2).reshape(weight.shape)  # (H * D, R)
