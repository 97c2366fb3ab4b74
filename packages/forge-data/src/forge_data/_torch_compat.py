"""The one private torch symbol that this package uses."""

from __future__ import annotations

from typing import Any


def end_workers(iterator: Any) -> None:
    """End and join the processes of a DataLoader's iterator now, even while it is still referenced.

    Torch ends them when the iterator is collected. A traceback that holds a frame delays this until
    the process exits, and the exit then waits for ever. Checked on torch 2.13.
    """
    iterator._shutdown_workers()
