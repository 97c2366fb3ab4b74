"""Console sink: rows of metrics as one live line on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

__all__ = ["ConsoleSink", "console_mode"]


class ConsoleSink:
    """Shows each row; `mode` is `live` (rich progress line) or `plain` (one line per row).

    A row has the columns of `forge_parallel.metric_rows`. Live updates go through rich's own refresh thread. Errors (a closed stdout, a broken pipe) are
    the caller's: BackgroundSink turns them into one warning. Needs the package rich.
    """

    name = "console"

    def __init__(self, mode: Literal["live", "plain"], first_step: int, total_steps: int) -> None:
        self._total_steps = total_steps
        self._live: Any = None
        if mode == "live":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._live = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}  left {task.fields[left]}"),
                console=Console(file=sys.stdout),
            )
            fields: Any = {"total": total_steps, "completed": first_step, "text": "", "left": "?"}
            self._task = self._live.add_task("", **fields)
            self._live.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Show a row."""
        step, seconds, text = row["step"], row["seconds_left"], _describe(row)
        # None before the first step, as no speed is known yet
        left = "?" if seconds is None else str(timedelta(seconds=round(seconds)))
        if self._live is None:
            print(f"step {step}/{self._total_steps}  {text}  left {left}", flush=True)
            return
        if row["val_loss"] is not None:
            self._live.console.print(f"step {step}  {text}", highlight=False)
        self._live.update(self._task, completed=step, text=text, left=left, refresh=True)

    def close(self) -> None:
        """Stop the live line."""
        if self._live is not None:
            self._live.stop()


def console_mode(
    wanted: Literal["auto", "live", "plain", "off"],
) -> Literal["live", "plain"] | None:
    """Resolve `auto`: live on a terminal that can move its cursor, plain elsewhere; `off` is None."""
    if wanted == "auto":
        from rich.console import Console

        console = Console()
        return "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    return None if wanted == "off" else wanted


def _describe(row: Mapping[str, Any]) -> str:
    """The text of a row: loss, learning rate, throughput, memory."""
    val = [] if row["val_loss"] is None else [f"val {row['val_loss']:.4f}"]
    # an evaluation before the first step, so no step has set the other values
    if row["lr"] is None:
        return "  ".join(["before training", *val])
    parts = [f"loss {_fixed(row['loss'], 4)}", *val, f"grad {_fixed(row['grad_norm'], 3)}"]
    parts += [f"lr {row['lr']:.2e}", f"{_with_si_prefix(row['tokens_per_second'])} tok/s"]
    parts += [] if row["mfu"] is None else [f"mfu {row['mfu']:.1%}"]
    parts.append(f"wait {row['data_wait_seconds']:.2f} s")
    parts.append(f"mem {row['memory_bytes'] / 2**30:.2f} GiB")
    parts += [f"skipped {row['skipped_steps']}"] if row["skipped_steps"] else []
    return "  ".join(parts)


def _fixed(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _with_si_prefix(value: float) -> str:
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if prefix == 'k' else limit):.1f}{prefix}"
    return f"{value:.0f}"
