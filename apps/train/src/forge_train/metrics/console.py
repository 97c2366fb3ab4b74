"""Progress for a person: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class ConsoleSink:
    """Shows each row; `name` is `live` (rich progress line) or `plain` (one line per row).

    Live updates go through rich's own refresh thread. Errors (a closed stdout, a broken pipe) are
    the caller's: BackgroundSink turns them into one warning.
    """

    name = "console"

    def __init__(self, mode: Literal["live", "plain"], first_step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self.view: _View = _Live(first_step, total_steps) if mode == "live" else _Plain(total_steps)

    def write(self, row: Mapping[str, Any]) -> None:
        self.view.show(row, _describe(row))

    def close(self) -> None:
        self.view.close()


class _View(Protocol):
    def show(self, row: Mapping[str, Any], text: str) -> None: ...
    def close(self) -> None: ...


class _Plain:
    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def show(self, row: Mapping[str, Any], text: str) -> None:
        print(f"step {row['step']}/{self.total_steps}  {text}  left {_left(row)}", flush=True)

    def close(self) -> None:
        pass


class _Live:
    def __init__(self, first_step: int, total_steps: int) -> None:
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}  left {task.fields[left]}"),
            console=Console(file=sys.stdout),
        )
        self.task = self.progress.add_task(
            "", total=total_steps, completed=first_step, text="", left="?"
        )
        self.progress.start()

    def show(self, row: Mapping[str, Any], text: str) -> None:
        if row["val_loss"] is not None:
            self.progress.console.print(f"step {row['step']}  {text}", highlight=False)
        left = _left(row)
        self.progress.update(self.task, completed=row["step"], text=text, left=left, refresh=True)

    def close(self) -> None:
        self.progress.stop()


def console_mode(wanted: str) -> Literal["live", "plain"] | None:
    """`auto` is live on a terminal that can move its cursor, plain elsewhere; `off` is None."""
    if wanted == "off":
        return None
    if wanted == "auto":
        return "live" if Console().is_terminal and not Console().is_dumb_terminal else "plain"
    return "live" if wanted == "live" else "plain"


def _left(row: Mapping[str, Any]) -> str:
    """The time to the end; unknown before the first step."""
    seconds = row["seconds_left"]
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))


def _describe(row: Mapping[str, Any]) -> str:
    if row["lr"] is None:  # an evaluation before the first step
        return "before training" + (
            "" if row["val_loss"] is None else f"  val {row['val_loss']:.4f}"
        )
    parts = [f"loss {_number(row['loss'], 4)}"]
    if row["val_loss"] is not None:
        parts.append(f"val {row['val_loss']:.4f}")
    parts += [
        f"grad {_number(row['grad_norm'], 3)}",
        f"lr {row['lr']:.2e}",
        f"{_short(row['tokens_per_second'])} tok/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    parts += [
        f"wait {row['data_wait_seconds']:.2f} s",
        f"mem {row['memory_bytes'] / 2**30:.2f} GiB",
    ]
    if row["skipped_steps"]:
        parts.append(f"skipped {row['skipped_steps']}")
    return "  ".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}"
