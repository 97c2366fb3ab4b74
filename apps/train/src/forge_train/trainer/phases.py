"""A run goes from phase to phase of its data: batches, and the forward and backward, follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_data import Loader
from forge_parallel.compute import Compute
from forge_parallel.micro_batches import MicroBatches
from forge_train.config.schema import JobConfig
from forge_train.trainer.course import Course


class Phases:
    """What changes between the segments of a course. Every rank calls `enter` before it reads a batch.

    segment     that of the step
    division    of its batches
    compute     of its rows; `evaluates` is that of the first segment, so that all evaluations compute alike
    """

    def __init__(
        self,
        course: Course,
        loader: Loader,
        division: MicroBatches,
        compute: Compute,
        make: Callable[[JobConfig, MicroBatches], Compute],
        divide: Callable[[JobConfig], MicroBatches],
        record: Callable[..., None],
    ) -> None:
        self.segment, self.division = course.segments[0], division
        self.compute = self.evaluates = compute
        self._course, self._loader = course, loader
        self._make, self._divide, self._record = make, divide, record

    def enter(self, step: int) -> None:
        """Go to the segment of the next instance, before step `step`; an event says what is new. No communication."""
        before, segment = self.segment, self._course.at(self._loader.next_instance)
        if segment.name == before.name:
            return
        self.segment = segment
        shape = {"seq_len": segment.seq_len, "global_batch": self._course.batch_of(segment)}
        if shape != {"seq_len": before.seq_len, "global_batch": self._course.batch_of(before)}:
            self._change(self._course.config_of(segment))
        fields: dict[str, Any] = {
            "name": segment.name,
            **shape,
            "instance": self._loader.next_instance,
        }
        self._record("phase", step=step, **fields, lr_multiplier=segment.lr_multiplier)

    def _change(self, config: JobConfig) -> None:
        self.division = division = self._divide(config)
        self._loader.rebatch(division.global_batch, division.size, division.count)
        self.compute = self._make(config, division)
