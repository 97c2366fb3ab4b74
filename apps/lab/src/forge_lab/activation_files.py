"""Files of activations: one .npz, or a folder of safetensors, made of parts that are written one batch at a time.

The parts are next to the output until all are there: memory holds one of them, and a command that was killed goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy

from forge_lab._shared.atomic import new_file, sync_folder, write_file
from forge_lab._shared.locks import Held, Lock
from forge_lab._shared.paths import files_named
from forge_lab._shared.problems import Problem, invalid
from forge_train.errors import StateError, write_errors

_REQUEST, _LOCK = "request.json", "lock"


def output_problems(out: Path) -> Iterator[Problem]:
    """Problems of an output, which is a new file .npz or a new folder."""
    key, shown = "--output", str(out)
    if out.exists():
        # left by a command that was killed after its last step
        shutil.rmtree(Parts(out).folder, ignore_errors=True)
        yield Problem(key, "exists", shown, "exists already", "name another file, or remove it")
    elif out.suffix not in ("", ".npz"):
        rule = "must end in .npz, or be the name of a folder for safetensors"
        yield Problem(key, "name", shown, rule, "rename it")
    elif not out.suffix:
        try:
            import safetensors  # noqa: F401
        except ImportError:
            rule = "is a folder, and needs safetensors, which is not installed"
            yield Problem(key, "requires", shown, rule, "pip install 'forge-lab[safetensors]'")


class Parts:
    """The parts of an output, each the sequences from a start on; all of them belong to one request."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out.with_name(out.name + ".parts")
        self._lock: Lock | None = None

    def open(self, request: dict[str, Any]) -> None:
        """Make the folder, or go on with one of the same request.

        StateError for a folder of another request, or of a command that still writes.
        """
        asked = self.folder / _REQUEST
        with _room_on_disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = Lock(self.folder / _LOCK)
            except Held as error:
                rule, fix = f"is written by {error.owner}", "wait for it, or name another --output"
                raise invalid("", "locked", str(self.folder), rule, fix, kind=StateError) from None

            try:
                before: dict[str, Any] = json.loads(asked.read_text())
            except (FileNotFoundError, ValueError):
                before = {}
            if not before or not self.starts():
                _empty(self.folder)  # its parts have no request
                write_file(asked, json.dumps(request))
                return

        other = next((key for key in request if before.get(key) != request[key]), None)
        if other is not None:
            rule = f"is of the parts in {self.folder}, and now {request[other]!r}"
            fix = "give the command of these parts again, or remove the folder"
            raise invalid(other, "changed", before.get(other), rule, fix, kind=StateError)

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.release()

    def starts(self) -> set[int]:
        """The first rows of the parts that are there."""
        return {int(path.stem.removeprefix("rows-")) for path in self.folder.glob("rows-*.npz")}

    def write(self, start: int, values: dict[str, numpy.ndarray]) -> None:
        """Write one part atomically."""
        path = self.folder / f"rows-{start:09d}.npz"
        with _room_on_disk(self.folder), new_file(path) as file:
            numpy.savez(file, **values)  # type: ignore[arg-type, unused-ignore]

    def join(self, shard_bytes: int) -> None:
        """Make the output from all parts, and remove them. Memory: a part, and a shard of a folder.

        StateError if parts are missing: ranks wrote them to another file system.
        """
        request = json.loads((self.folder / _REQUEST).read_text())
        files = sorted(self.folder.glob("rows-*.npz"))
        counts = [len(_array(path, "tokens")) for path in files]
        rows = sum(counts)
        if rows != request["rows"]:
            rule = f"of {request['rows']} rows are in {self.folder}, and all ranks must write there"
            fix = "put --output on a file system that they share"
            raise invalid("", "not_shared", rows, rule, fix, kind=StateError)

        with numpy.load(files[0]) as first:
            shapes = {name: (first[name].shape[1:], first[name].dtype) for name in first.files}

        with _room_on_disk(self.folder):
            if self.out.suffix == ".npz":
                made = _npz(self.folder / "all.tmp", files, rows, shapes, json.dumps(request))
            else:
                folder = self.folder / f"shards-{shard_bytes}"
                made = _shards(folder, dict(zip(files, counts)), shapes, request, shard_bytes)
            os.replace(made, self.out)
            sync_folder(self.out.parent)
        shutil.rmtree(self.folder)


def _room_on_disk(folder: Path) -> AbstractContextManager[None]:
    return write_errors("", folder, "make room there, then give the command again", StateError)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


#: By name, the shape and dtype of a row.
_Shapes = dict[str, tuple[tuple[int, ...], Any]]


def _npz(path: Path, files: list[Path], rows: int, shapes: _Shapes, meta: str) -> Path:
    """Write one .npz of all parts, array by array, part by part: memory holds one array of one part."""
    with new_file(path) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, (shape, dtype) in shapes.items():
            header = {
                "descr": numpy.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (rows, *shape),
            }
            with archive.open(_entry(name), "w", force_zip64=True) as file:
                numpy.lib.format.write_array_header_2_0(file, header)  # type: ignore[no-untyped-call, unused-ignore]
                for part in files:
                    file.write(numpy.ascontiguousarray(_array(part, name, shape)).tobytes())
        with archive.open(_entry("meta"), "w") as file:
            numpy.lib.format.write_array(file, numpy.array(meta))
    return path


def _shards(
    folder: Path, files: dict[Path, int], shapes: _Shapes, request: dict[str, Any], most: int
) -> Path:
    """Write a folder of safetensors of at most `most` bytes (at least one sequence) and index.json.

    A shard that exists is kept, so that a killed command goes on.
    """
    from safetensors.numpy import save

    folder.mkdir(exist_ok=True)
    rows = request["rows"]
    size = sum(math.prod(shape) * numpy.dtype(dtype).itemsize for shape, dtype in shapes.values())
    at_once = max(1, most // size)
    starts = range(0, rows, at_once)

    shards = []
    for number, start in enumerate(starts, 1):
        stop = min(start + at_once, rows)
        path = folder / f"rows-{number:05d}-of-{len(starts):05d}.safetensors"
        shards.append({"file": path.name, "first_row": start, "rows": stop - start})
        if path.exists():
            continue

        values = {
            name: _rows(files, name, shape, start, stop) for name, (shape, _) in shapes.items()
        }
        # one entry: safetensors writes several in another order each time
        meta = {"meta": json.dumps(request | shards[-1])}
        write_file(path, save(values, metadata=meta))

    arrays = {
        name: {"row_shape": list(shape), "dtype": str(dtype)}
        for name, (shape, dtype) in shapes.items()
    }
    index = {"meta": request, "arrays": arrays, "shards": shards}
    write_file(folder / "index.json", json.dumps(index, indent=1))
    for partial in files_named(folder, "."):  # left by a command that was killed on another machine
        partial.unlink()
    return folder


def _rows(
    files: dict[Path, int], name: str, shape: tuple[int, ...], start: int, stop: int
) -> numpy.ndarray:
    """Rows [start, stop) of an array; `files` are the parts and the number of rows in each."""
    found, first = [], 0
    for path, count in files.items():
        if first < stop and first + count > start:
            found.append(_array(path, name, shape)[max(0, start - first) : stop - first])
        first += count
    return numpy.concatenate(found)


def _array(path: Path, name: str, shape: tuple[int, ...] | None = None) -> numpy.ndarray:
    """Read an array of a part; StateError if it cannot be read, or its rows have another shape."""
    try:
        with numpy.load(path) as part:
            values: numpy.ndarray = part[name]
    except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
        rule, fix = f"is damaged ({error})", "remove it, and give the command again"
        raise invalid("", "damaged", str(path), rule, fix, kind=StateError) from error
    if shape is not None and values.shape[1:] != shape:
        rule = f"is the shape of some rows, and that of others is {shape}"
        raise invalid(name, "shape", values.shape[1:], rule, kind=StateError)
    return values


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry without a time, so that the same values make the same file."""
    return zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
