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
Show = Callable[[int, int], None]


@contextlib.contextmanager
def progress_bar(
    title: str, *, of_bytes: bool = True, in_logs: Show = lambda done, total: None
) -> Iterator[Show]:
    """Yield a function of what is done and what there is in all, bytes or parts; `in_logs` where there is no bar.

    It draws in the caller's thread, so the caller may fork.
    """
    # isatty: rich writes control characters into a pipe where FORCE_COLOR is set
    if sys.stderr is None or not sys.stderr.isatty():
        yield in_logs
        return

    try:
        from rich.console import Console
        from rich.progress import (  # fmt: skip
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield in_logs
        return

    amounts = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task, drawn = bar.add_task(title, total=None), 0.0

        def show(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= _SECONDS or done >= total:
                drawn = now
                bar.update(task, completed=done, total=total, refresh=True)

        yield show
