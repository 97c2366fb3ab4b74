"""The data of bad steps, which a run that goes back leaves out of its stream."""

from __future__ import annotations

from collections.abc import Sequence

from forge_data import Loader
from forge_train.config.schema import JobConfig
from forge_train.trainer.progress import Progress


def instances_of_steps(
    loader: Loader, config: JobConfig, progress: Progress, first: int, last: int
) -> tuple[int, int]:
    """The first and last instance of steps `first` to `last`, up to the last one that is counted."""
    global_batch, end = config.train.global_batch, progress.tokens // config.data.seq_len
    start = max(0, end - (progress.step - first + 1) * global_batch)
    ids = loader.ids(start, end - (progress.step - last) * global_batch)
    return int(ids[0]), int(ids[-1])


def skip_windows(loader: Loader, windows: Sequence[tuple[int, int]]) -> None:
    """Leave these instances out from the cursor on; what is before it is in the ledger already."""
    for first, last in windows:
        following = int(loader.ids(loader.cursor, loader.cursor + 1)[0])
        if last >= following:
            loader.skip(max(first, following), last)
