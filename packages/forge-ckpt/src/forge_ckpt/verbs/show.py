"""What the commands share: arguments, exit codes, tables on stdout and bars on stderr."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from forge_ckpt import directories
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import one_line
from forge_ckpt.foreign import refuse_foreign

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


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal, gone at the end; called with bytes done and bytes in all."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
        rule = "holds no step-00000100, ..."
        raise invalid("directory", "empty", str(directory), rule, where)
    return steps


def chosen(directory: Path, step: int | None) -> int:
    """``step`` if the directory has it; without one the newest."""
    steps = steps_of(directory)
    if step is not None and step not in steps:
        fix = f"use one of {', '.join(map(str, steps))}"
        raise invalid("step", "not_found", step, f"is not in {directory}", fix)
    return steps[-1] if step is None else step
