"""``diff``: where two checkpoints differ, by names, shapes, dtypes, numbers and objects."""

from typing import Any

import torch
from torch import Tensor

from forge_ckpt import codec
from forge_ckpt._shared.bars import progress_bar
from forge_ckpt.read.memory import equal_bits
from forge_ckpt.read.tensors import SavedTensors
from forge_ckpt.verbs.look import (
    DIFFERENT,
    SAME,
    CheckpointPath,
    print_columns,
    print_json,
    print_line,
)

_ELEMENTS_AT_ONCE = 2**20  # tensors are compared in float64, and a large one would not fit


def diff(a: CheckpointPath, b: CheckpointPath, /, json: bool = False) -> int:
    """Compare two checkpoints: steps or the newest of stores, of any layout. Ends with 1 if they differ.

    Everything is verified while it is read. Memory: one tensor of each.

    Args:
        a: a step, such as runs/a/checkpoints/step-00000100, or a directory of them.
        b: the other one.
        json: print one JSON object instead of tables.
    """
    with SavedTensors(a) as one, SavedTensors(b) as two:
        found = _compare(one, two)
    if json:
        print_json(found)
    else:
        _print(found)
    return DIFFERENT if any(found[key] for key in _KINDS) else SAME


_NUMBERS = ("elements", "max_abs", "max_rel")
_KINDS = ("only_in_a", "only_in_b", "tensors", "objects")


def _compare(one: SavedTensors, two: SavedTensors) -> dict[str, Any]:
    """All differences, as ``diff --json`` prints them."""
    a, b = one.table.tensors, two.table.tensors
    values = _leaves(one), _leaves(two)
    names = [set(table) | set(leaves) for table, leaves in zip((a, b), values)]
    shared = [name for name in a if name in b]
    total = sum(chunk.length for name in shared for chunk in a[name].chunks)
    differences, done = [], 0
    with progress_bar("compare") as bar:
        for name in shared:
            differences += _difference(name, one, two)
            done += sum(chunk.length for chunk in a[name].chunks)
            bar(done, total)

    return {
        "only_in_a": sorted(names[0] - names[1]),
        "only_in_b": sorted(names[1] - names[0]),
        "tensors": differences,
        "objects": {
            name: [value, values[1][name]]
            for name, value in values[0].items()
            if name in values[1] and _text(value) != _text(values[1][name])
        },
        "equal": len(shared) - len(differences),
    }


def _difference(name: str, one: SavedTensors, two: SavedTensors) -> list[dict[str, Any]]:
    """Shapes, dtypes and distance of a tensor in a list; an empty list for equal bits. Without numbers for other shapes.

    ``max_abs`` is the largest |a - b|, ``max_rel`` the largest |a - b| / |b|.
    """
    entries = one.table.tensors[name], two.table.tensors[name]
    found: dict[str, Any] = {"name": name, "shapes": [list(entry.shape) for entry in entries]}
    found["dtypes"] = [codec.dtype_name(entry.dtype) for entry in entries]
    numbers: tuple[float | None, ...] = (None, None, None)
    if entries[0].shape == entries[1].shape:
        x, y = one.read(name), two.read(name)
        if entries[0].dtype == entries[1].dtype and equal_bits(x, y):
            return []
        numbers = _distance(x.reshape(-1), y.reshape(-1))
    return [{**found, **dict(zip(_NUMBERS, numbers))}]


def _distance(x: Tensor, y: Tensor) -> tuple[int, float, float]:
    """Elements that differ, and the largest absolute and relative difference, in float64."""
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    count, largest = 0, torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(x), _ELEMENTS_AT_ONCE):
        one, two = x[start : start + _ELEMENTS_AT_ONCE], y[start : start + _ELEMENTS_AT_ONCE]
        a, b = one.to(wide), two.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        # by bits: -0.0 is not 0.0, nor are large integers alike in float64
        if one.dtype == two.dtype:
            bits = (t.contiguous().view(torch.uint8).view(len(one), -1) for t in (one, two))
            count += int(torch.ne(*bits).any(1).sum())
        else:
            count += int((~same).sum())
        distance = torch.where(same, 0.0, (a - b).abs())
        share = torch.where(same, 0.0, distance / b.abs())
        # amax and maximum keep nan: a nan on one side is a difference without a number
        largest = torch.maximum(largest, torch.stack([distance.amax(), share.amax()]))
    absolute, relative = largest.tolist()
    return count, absolute, relative


def _leaves(saved: SavedTensors) -> dict[str, Any]:
    """Objects down to their leaves: a tool may have saved a container in parts that another saved whole."""
    found: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, list) and value:
            for number, item in enumerate(value):
                visit(f"{name}.{number}", item)
        else:
            found[name] = value

    for name in saved.table.objects:
        visit(name, saved.read_object(name))
    return found


def _text(value: Any) -> str:
    """A text that is equal for equal bits: nan is nan, and 1 is not 1.0."""
    return codec.dumps(codec.encode(value, ""))


def _print(found: dict[str, Any]) -> None:
    for key, label in (("only_in_a", "only in A"), ("only_in_b", "only in B")):
        for name in found[key]:
            print_line(f"{label}: {name}")
    if found["tensors"]:
        rows = [("tensor", "shape", "dtype", "differ", "max abs", "max rel")]
        for t in found["tensors"]:
            shape = " / ".join(dict.fromkeys(str(tuple(s)) for s in t["shapes"]))
            dtype = " / ".join(dict.fromkeys(t["dtypes"]))
            numbers = [t[key] for key in _NUMBERS]
            cells = [
                "" if n is None else f"{n:.3g}" if isinstance(n, float) else f"{n:,}"
                for n in numbers
            ]
            rows.append((t["name"], shape, dtype, *cells))
        print_columns(rows, right={3, 4, 5})

    for name, (a, b) in found["objects"].items():
        print_line(f"{name}: {a!r:.100} in A, {b!r:.100} in B")
    print(f"{found['equal']} tensors are equal, {len(found['tensors'])} differ")
