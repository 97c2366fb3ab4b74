"""The commands of forge-ckpt. They only read: nothing is locked, moved or removed."""

import json as json_lines
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from forge_ckpt import directories, manifest
from forge_ckpt.errors import CorruptCheckpoint
from forge_ckpt.files import Directory
from forge_ckpt.read.blocks import verify_files

_Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_Step = Annotated[int | None, tyro.conf.arg(metavar="N")]


def run(arguments: Sequence[str] | None = None) -> bool:
    """Run ``ls``, ``inspect`` or ``verify``; returns whether something was corrupt."""
    return tyro.extras.subcommand_cli_from_dict(
        {"ls": ls, "inspect": inspect, "verify": verify},
        prog="forge-ckpt",
        description="Look at a directory of checkpoints. Exit codes: 0, 66 corrupt, 78 wrong usage.",
        args=arguments,
        use_underscores=True,
    )


def ls(directory: _Directory, /) -> bool:
    """List the checkpoints of DIR with sizes and files; also quarantined and unfinished ones.

    Reads the manifests, not the data.
    """
    corrupt = False
    rows = [("step", "saved", "bytes", "files", "tensors", "")]
    for step in _steps(directory):
        path = directories.step_directory(directory, step)
        saved = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", timespec="seconds")
        try:
            table = _table(path, step)
            size = sum(entry.size for entry in table.files.values())
            counts = str(len(table.files)), str(len(table.tensors))
            rows.append((str(step), saved, f"{size:,}", *counts, ""))
        except CorruptCheckpoint as error:
            corrupt = True
            rows.append((str(step), saved, "", "", "", f"corrupt: {error}"))
    _print_columns(rows, right={0, 2, 3, 4})
    for name in directories.quarantined(directory):
        print(f"{directories.QUARANTINE}/{name}: found corrupt earlier")
    for name in directories.temporary_names(directory):
        print(f"{name}: being written, or left by a writer that died")
    return corrupt


def inspect(directory: _Directory, /, step: _Step = None, json: bool = False) -> bool:
    """Show the content of a checkpoint of DIR: files, tensors with shape and dtype, objects.

    Args:
        directory: the directory of the checkpoints of a run.
        step: the checkpoint to show; without it the newest.
        json: print one JSON object instead of tables.
    """
    chosen = _chosen(directory, step)
    found = manifest.summary(_table(directories.step_directory(directory, chosen), chosen))
    if json:
        print(json_lines.dumps(found))
        return False
    print(f"step {found['step']}, {found['bytes']:,} bytes, saved with torch {found['torch']}\n")
    files = [(name, f"{size:,}") for name, size in found["files"].items()]
    _print_columns([("file", "bytes"), *files], right={1})
    print()
    tensors = [
        (name, str(tuple(entry["shape"])), entry["dtype"], f"{entry['bytes']:,}")
        for name, entry in sorted(found["tensors"].items())
    ]
    _print_columns([("tensor", "shape", "dtype", "bytes"), *tensors], right={3})
    print("\nobjects: " + (", ".join(found["objects"]) or "none"))
    return False


def verify(directory: _Directory, /, step: _Step = None, json: bool = False) -> bool:
    """Read checkpoints of DIR completely and compare every block with its digest.

    Args:
        directory: the directory of the checkpoints of a run.
        step: the checkpoint to verify; without it all.
        json: print one JSON object with a list "checkpoints" of step, bytes, seconds and error.
    """
    steps = _steps(directory) if step is None else [_chosen(directory, step)]
    checked = [_verify(directories.step_directory(directory, number), number) for number in steps]
    if json:
        print(json_lines.dumps({"checkpoints": checked}))
    else:
        for row in checked:
            rate = row["bytes"] / 1e9 / max(row["seconds"], 1e-9)
            sound = f"sound, {row['bytes']:,} bytes in {row['seconds']:.2f} s ({rate:.2f} GB/s)"
            print(f"step {row['step']}: " + (row["error"] or sound))
    return any(row["error"] for row in checked)


def _verify(path: Path, step: int) -> dict[str, Any]:
    started, size, error = time.perf_counter(), 0, None
    try:
        with Directory(path) as opened:
            table = manifest.read(opened, step)
            size = sum(entry.size for entry in table.files.values())
            with _progress(f"step {step}", size) as done:
                verify_files(opened, table, list(table.files), threads=2, progress=done)
    except CorruptCheckpoint as problem:
        error = f"corrupt: {problem}"
    seconds = round(time.perf_counter() - started, 4)
    return {"step": step, "bytes": size, "seconds": seconds, "error": error}


@contextmanager
def _progress(title: str, size: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal; it disappears at the end."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=size)
        yield lambda done: bar.update(task, completed=done)


def _steps(directory: Path) -> list[int]:
    """All steps, with a manifest or without: the damaged ones must be shown too."""
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory; give the one that holds step-00000100, ..."
        )
    steps = directories.list_steps(directory)
    if not steps:
        inside = [p.name for p in sorted(directory.iterdir()) if p.is_dir()]
        inside = [name for name in inside if directories.list_steps(directory / name)]
        where = f"{directory / inside[0]} holds some" if inside else "look in another directory"
        raise ValueError(f"{directory} holds no step-00000100, ...; {where}")
    return steps


def _chosen(directory: Path, step: int | None) -> int:
    steps = _steps(directory)
    if step is not None and step not in steps:
        raise ValueError(
            f"step {step} is not in {directory}; there are {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def _table(path: Path, step: int) -> manifest.Manifest:
    with Directory(path) as opened:
        return manifest.read(opened, step)


def _print_columns(rows: Sequence[tuple[str, ...]], right: set[int]) -> None:
    """Columns as wide as their longest cell; those in ``right`` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())
