"""Fields of the events `start` and `resume` that tell the lives of a run apart, for its ledger of seconds."""

from __future__ import annotations

from collections import deque
from typing import Any

from forge_resilience.goodput import process_start_time
from forge_train.metrics.jsonl import read_rows
from forge_train.trainer.progress import Progress
from forge_train.trainer.run_directory import RunDirectory


def life_fields(paths: RunDirectory, progress: Progress) -> dict[str, Any]:
    """`began` of this process; after an earlier life `reached`, the step and time of its last row, and `steps_lost`
    and `seconds_lost`, the training between the loaded checkpoint and that row.

    To be called before metrics.jsonl is cut to the loaded step. Times are seconds since 1970.
    """
    fields: dict[str, Any] = {"began": round(process_start_time(), 3)}
    try:
        written = paths.metrics.stat().st_mtime
        last = next(iter(deque(read_rows(paths.metrics), maxlen=1)), None)
    except OSError:  # the first life
        return fields
    if last is not None:
        fields["reached"] = {"step": last["step"], "time": round(written, 3)}
        fields["steps_lost"] = max(0, last["step"] - progress.step)
        seconds = (last.get("seconds") or 0.0) - progress.seconds
        fields["seconds_lost"] = round(max(0.0, seconds), 4)
    return fields


def last_rate(paths: RunDirectory, step: int) -> tuple[int, float] | None:
    """(step, learning rate) of the last row up to a step; None without one."""
    found = None
    try:
        for row in read_rows(paths.metrics):
            if row["step"] <= step and row.get("lr") is not None:
                found = row["step"], float(row["lr"])
    except OSError:
        return None
    return found
