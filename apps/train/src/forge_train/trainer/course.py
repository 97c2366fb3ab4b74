"""The phases of a job: its configuration in each, and the step at which the learning rate stands."""

from __future__ import annotations

import math
from dataclasses import replace

from forge_data.phase_schedule import PhaseSchedule
from forge_data.phases import PhaseSegment
from forge_train.config.schema import JobConfig


class Course(PhaseSchedule):
    """The phases of a job."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        super().__init__(config.data, config.train.global_batch)

    def config_of(self, segment: PhaseSegment) -> JobConfig:
        """The job as it would be if all of it were this segment."""
        data = replace(self._config.data, seq_len=segment.seq_len, phases={})
        train = replace(self._config.train, global_batch=self.batch_of(segment))
        return replace(self._config, data=data, train=train)

    def scheduled(self, step: int, tokens: int) -> int:
        """The step at which the schedule of the rate stands after step `step`, with `tokens` in all.

        Where phases change the tokens of a step it counts them, in steps of the first segment, rounded up.
        """
        if not self.changes_batch:
            return step
        first = self.segments[0]
        return math.ceil(tokens / (self.batch_of(first) * first.seq_len))

    def scheduled_steps(self, total_steps: int) -> int:
        """The length of the schedule of a run."""
        _, tokens, own = self.at_step(total_steps)
        return self.scheduled(total_steps, tokens + own)
