# Copied from scripts/shared/bars.py; edit that file, then run scripts/copy_shared.py.
"""A progress bar on stderr for long work, gone at its end; nothing where stderr is no terminal.

    with progress_bar("verify") as show:
        verify(folder, progress=show)          # show(done, total)

It needs the package rich, and shows nothing without it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SECONDS = 0.1  # between two drawings


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of bytes done and bytes in all. It draws in the caller's thread, so the caller may fork."""
    try:
        from rich.console import Console
        from rich.progress import (  # fmt: skip
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield lambda done, total: None
        return

    # isatty: rich writes control characters into a pipe where FORCE_COLOR is set
    hidden = sys.stderr is None or not sys.stderr.isatty()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=hidden) as bar:  # fmt: skip
        task, drawn = bar.add_task(title, total=None), 0.0

        def show(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= _SECONDS or done >= total:
                drawn = now
                bar.update(task, completed=done, total=total, refresh=True)

        yield show
