"""The data of bad steps, which a run that goes back leaves out of its stream."""

from __future__ import annotations

from collections.abc import Sequence

from forge_data import Loader
from forge_train.trainer.course import Course
from forge_train.trainer.progress import Progress


def instances_of_steps(
    loader: Loader, course: Course, progress: Progress, first: int, last: int
) -> tuple[int, int]:
    """The first and last instance of steps `first` to `last`, up to the last one that is counted."""
    windows, step = loader.skipped, progress.step
    end = course.cursor(progress.tokens, windows)  # the loader may be a step ahead
    start = course.steps_back(end, step - first + 1, windows, loader.began)
    ids = loader.ids(start, course.steps_back(end, step - last, windows, loader.began))
    return int(ids[0]), int(ids[-1])


def skip_windows(loader: Loader, windows: Sequence[tuple[int, int]]) -> None:
    """Leave these instances out from the cursor on; what is before it is in the ledger already."""
    for first, last in windows:
        following = int(loader.ids(loader.cursor, loader.cursor + 1)[0])
        if last >= following:
            loader.skip(max(first, following), last)
