"""``ls``, ``inspect``, ``verify``, ``cat``, which only read; and what all commands share: arguments, tables, bars."""

import json
import math
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from forge_ckpt import codec, directories, manifest
from forge_ckpt._shared.bars import progress_bar
from forge_ckpt._shared.names import nearest_names
from forge_ckpt._shared.problems import invalid
from forge_ckpt.directories import refuse_foreign
from forge_ckpt.errors import CorruptCheckpoint, one_line
from forge_ckpt.files import Directory
from forge_ckpt.read.blocks import verify_files
from forge_ckpt.read.tensors import SavedTensors

SAME, DIFFERENT, CORRUPT = 0, 1, 66

StorePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
CheckpointPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
StepNumber = Annotated[int | None, tyro.conf.arg(metavar="N")]


def print_json(value: Any) -> None:
    """One line of strict JSON; nan and infinities as strings."""
    print(json.dumps(plain(value), allow_nan=False))


def plain(value: Any) -> Any:
    """``value`` as what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def print_line(text: str) -> None:
    """A line that may hold names from a disk."""
    print(one_line(text, None))


def print_columns(rows: Sequence[tuple[str, ...]], right: set[int]) -> None:
    """Columns as wide as their longest cell; those in ``right`` are right-aligned."""
    rows = [tuple(one_line(cell, None) for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())


def steps_of(directory: Path) -> list[int]:
    """All steps, with a manifest or without: the damaged ones must be shown too."""
    if not directory.is_dir():
        fix = "give the one that holds step-00000100, ..."
        raise invalid("directory", "not_found", str(directory), "is not a directory", fix)
    steps = directories.list_steps(directory)
    if not steps:
        refuse_foreign(directory)
        inside = [p.name for p in sorted(directory.iterdir()) if p.is_dir()]
        inside = [name for name in inside if directories.list_steps(directory / name)]
        where = f"{directory / inside[0]} holds some" if inside else "look in another directory"
        if aside := directories.quarantined(directory):
            where = f"{aside[-1]} is in {directories.QUARANTINE}: restore a copy of it"
        rule = "holds no step-00000100, ..."
        raise invalid("directory", "empty", str(directory), rule, where)
    return steps


def chosen(directory: Path, step: int | None) -> int:
    """``step`` if the directory has it; without one the newest."""
    steps = steps_of(directory)
    found = directories.newest_step(directory) if step is None else step
    if found is None or found not in steps:
        fix = f"use one of {', '.join(map(str, steps))}"
        raise invalid("step", "not_found", step, f"is not in {directory}", fix)
    return found


def ls(directory: StorePath, /, json: bool = False) -> int:
    """List the checkpoints of DIR with sizes and files; also quarantined and unfinished ones.

    Reads the manifests, not the data.

    Args:
        directory: the directory of the checkpoints of a run.
        json: print one JSON object instead of a table.
    """
    steps = [_listed(directory, step) for step in steps_of(directory)]
    aside, unfinished = directories.quarantined(directory), directories.temporary_names(directory)
    if json:
        print_json({"checkpoints": steps, "quarantine": aside, "unfinished": unfinished})
    else:
        rows = [("step", "saved", "bytes", "files", "tensors", "")]
        for s in steps:
            sizes = [f"{s[key]:,}" if s[key] is not None else "" for key in _SIZES]
            rows.append((str(s["step"]), s["saved"], *sizes, s["error"] or ""))
        print_columns(rows, right={0, 2, 3, 4})
        for name in aside:
            print_line(f"{directories.QUARANTINE}/{name}: found corrupt earlier")
        for name in unfinished:
            print_line(f"{name}: being written, or left by a writer that died")
    return CORRUPT if any(s["error"] for s in steps) else SAME


_SIZES = ("bytes", "files", "tensors")


def _listed(directory: Path, step: int) -> dict[str, Any]:
    """What ``ls`` shows of a step; of a corrupt one without sizes."""
    path = directories.step_directory(directory, step)
    saved = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", timespec="seconds")
    found: dict[str, Any] = {"step": step, "saved": saved, **dict.fromkeys(_SIZES), "error": None}
    try:
        table = manifest.read_from(path, step)
        sizes = sum(e.size for e in table.files.values()), len(table.files), len(table.tensors)
        found.update(zip(_SIZES, sizes))
    except CorruptCheckpoint as error:
        found["error"] = f"corrupt: {error}"
    return found


def inspect(directory: StorePath, /, step: StepNumber = None, json: bool = False) -> int:
    """Show the content of a checkpoint of DIR: files, tensors with shape and dtype, objects.

    Args:
        directory: the directory of the checkpoints of a run.
        step: the checkpoint to show; without it the newest.
        json: print one JSON object instead of tables.
    """
    number = chosen(directory, step)
    found = manifest.summary(
        manifest.read_from(directories.step_directory(directory, number), number)
    )
    if json:
        print_json(found)
        return SAME

    print_line(f"step {found['step']}, {found['bytes']:,} bytes, saved with torch {found['torch']}")
    print()
    files = [(name, f"{size:,}") for name, size in found["files"].items()]
    print_columns([("file", "bytes"), *files], right={1})
    print()
    tensors = [
        (name, str(tuple(entry["shape"])), entry["dtype"], f"{entry['bytes']:,}")
        for name, entry in sorted(found["tensors"].items())
    ]
    print_columns([("tensor", "shape", "dtype", "bytes"), *tensors], right={3})
    print()
    print_line("objects: " + (", ".join(found["objects"]) or "none"))
    return SAME


def verify(directory: StorePath, /, step: StepNumber = None, json: bool = False) -> int:
    """Read checkpoints of DIR completely and compare every block with its digest.

    Args:
        directory: the directory of the checkpoints of a run.
        step: the checkpoint to verify; without it all.
        json: print one JSON object with a list "checkpoints" of step, bytes, seconds and error.
    """
    steps = steps_of(directory) if step is None else [chosen(directory, step)]
    checked = [verified(directories.step_directory(directory, n), n)[0] for n in steps]
    if json:
        print_json({"checkpoints": checked})
    else:
        for row in checked:
            rate = row["bytes"] / 1e9 / max(row["seconds"], 1e-9)
            sound = f"sound, {row['bytes']:,} bytes in {row['seconds']:.2f} s ({rate:.2f} GB/s)"
            print_line(f"step {row['step']}: " + (row["error"] or sound))
    return CORRUPT if any(row["error"] for row in checked) else SAME


def verified(path: Path, step: int) -> tuple[dict[str, Any], CorruptCheckpoint | None]:
    """Compare all of a checkpoint: ``{"step", "bytes", "seconds", "error"}``, and the error itself."""
    started, size, found = time.perf_counter(), 0, None
    try:
        with Directory(path) as opened:
            table = manifest.read(opened, step)
            size = sum(entry.size for entry in table.files.values())
            with progress_bar(f"step {step}") as bar:
                names = list(table.files)
                verify_files(opened, table, names, 2, lambda done: bar(done, size))
    except CorruptCheckpoint as error:
        found = error
    text = None if found is None else f"corrupt: {found}"
    seconds = round(time.perf_counter() - started, 4)
    return {"step": step, "bytes": size, "seconds": seconds, "error": text}, found


_Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TENSOR")]
_Slice = Annotated[str | None, tyro.conf.arg(name="slice", metavar="0:2,:")]


def cat(
    directory: StorePath,
    name: _Name,
    /,
    step: StepNumber = None,
    part: _Slice = None,
    json: bool = False,
) -> int:
    """Print a tensor of a checkpoint of DIR, or a part of it, or an object.

    Only the blocks that the part touches are read, and they are verified.

    Args:
        directory: the directory of the checkpoints of a run.
        name: the dotted name of a tensor or an object, as `inspect` lists it.
        step: the checkpoint; without it the newest.
        part: for each dim a position or start:stop, such as 0:2,: or 3.
        json: print one JSON object with shape, dtype and values.
    """
    path = directories.step_directory(directory, chosen(directory, step))
    with SavedTensors(path) as saved:
        if name in saved.table.objects:
            value = saved.read_object(name)
            if json:
                print_json({"object": name, "value": value})
            else:
                print(repr(value))
            return SAME

        if name not in saved.table.tensors:
            paths = [*saved.table.paths()]
            names = [n for n in paths if name in n][:3] or nearest_names(name, paths)
            fix = f"use a name like {', '.join(names)}"
            raise invalid("name", "not_found", name, f"is not in {path}", fix)
        entry = saved.table.tensors[name]
        ranges, squeezed = _ranges(part or ",".join(":" * len(entry.shape)), entry.shape)
        box = saved.read_box(name, [r.start for r in ranges], [len(r) for r in ranges])
        box = box.squeeze(squeezed)

    if json:
        dtype = codec.dtype_name(box.dtype)
        shown = box.float() if box.dtype.is_floating_point else box  # float8 has no tolist
        values = shown.tolist() if not box.is_complex() else torch.view_as_real(box).tolist()
        print_json({"tensor": name, "shape": list(box.shape), "dtype": dtype, "values": values})
    else:
        print_line(f"{name} {tuple(box.shape)} {codec.dtype_name(box.dtype)}")
        print(box)
    return SAME


def _ranges(text: str, shape: tuple[int, ...]) -> tuple[list[range], tuple[int, ...]]:
    """The range of each dim, and the dims of which one position is asked."""
    parts = text.split(",") if text else []
    if len(parts) != len(shape):
        rule = f"has {len(parts)} parts, the tensor {len(shape)} dims"
        raise invalid("slice", "dims", text, rule)

    ranges, single = [], []
    for dim, (part, size) in enumerate(zip(parts, shape)):
        first, colon, last = part.partition(":")
        try:
            if not colon:
                single.append(dim)
                ranges.append(range(size)[int(first) :][:1])
            else:
                ranges.append(range(size)[slice(*(int(n) if n else None for n in (first, last)))])
        except ValueError:
            rule = f"has {part!r}, which must be a position or start:stop"
            raise invalid("slice", "position", text, rule) from None

        if size and not ranges[-1]:
            rule = f"has {part!r}, which is empty in a dim of size {size}"
            raise invalid("slice", "empty", text, rule)
    return ranges, tuple(single)
