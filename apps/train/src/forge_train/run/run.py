"""The state of a run: its fields, its clock and its counters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from forge_core.flops import peak_flops
from forge_core.loss import Objective
from forge_data import Batch, Loader
from forge_data.phases import PhaseSegment
from forge_parallel import Meshes, reshard
from forge_parallel.compute import Compute, MicroBatches
from forge_parallel.metric_rows import Columns, MetricRows, Timer
from forge_parallel.profile import span
from forge_resilience import Agreement, Decision
from forge_resilience.heartbeat import Heartbeat
from forge_resilience.progress import Progress
from forge_resilience.recorder import Recorder
from forge_train.build.build import Course, run_schedule
from forge_train.build.evaluation import Evaluation
from forge_train.build.layout import micro_batches
from forge_train.build.objective import loss_columns, make_compute
from forge_train.build.resolve import ResolvedJob
from forge_train.build.run_directory import RunDirectory
from forge_train.config.schema import JobConfig
from forge_train.metrics.columns import SCHEMA


class _Phase(NamedTuple):
    """What the heartbeat shows inside and after a phase, and what its time is to the meter: `wait` or `pause`."""

    inside: str = ""
    after: str = ""
    meter: str = ""


_PHASES = {
    "load": _Phase("load", "start"),
    "data": _Phase("data", "step", "wait"),
    "evaluate": _Phase("evaluate", "", "pause"),
    "save": _Phase("save", "", "pause"),
    "profile": _Phase("profile", "", "pause"),
}


class Hooks(Protocol):
    """What a run needs of its `Extensions`, which import it."""

    def __iter__(self) -> Iterator[Any]: ...
    def of(self, hook: str) -> list[Any]: ...
    def call(self, hook: str, *args: Any) -> None: ...
    def columns(self) -> Mapping[str, Columns]: ...


@dataclass(eq=False, kw_only=True)
class Run:
    """The state of a run, which extensions may read. In brackets: what writes a field after it was made.

    job, folder             the configuration and the run directory
    rank, device            of this process
    model                   not yet sharded, then this rank's part [Trainer._build]
    loader, course          the batches of this rank, and the phases of the data
    evaluation, extensions  held-out data; optional features
    division                how the first phase divides a global batch into micro-batches
    schedule                from a step to the factor of the learning rate
    flops_per_token         of each phase
    progress                steps and tokens so far [train_step, a loaded checkpoint]
    total_steps             [count_steps]
    total_tokens            of a run whose length is in tokens, else None
    agreement, meshes       how the ranks talk to each other [Trainer._join]
    objective, optimizer    [Trainer._build]
    segment, compute        of the data, and the forward and backward of its rows [Trainer._build, enter_segment]
    first_compute           that of the first segment: all evaluations compute alike [Trainer._build]
    recorder, rows          files and sinks; the row that waits for its numbers [restore, Trainer._open, a rollback]
    decision                of all ranks, in the newest step [train_step]
    """

    job: ResolvedJob
    folder: RunDirectory
    rank: int
    device: torch.device
    model: nn.Module
    loader: Loader
    course: Course
    evaluation: Evaluation
    extensions: Hooks
    division: MicroBatches
    schedule: Callable[[int], float]
    flops_per_token: list[float]
    progress: Progress
    total_steps: int
    total_tokens: int | None
    heartbeat: Heartbeat
    agreement: Agreement = field(default_factory=Agreement)
    meshes: Meshes = field(init=False, repr=False)
    objective: Objective | None = None
    optimizer: Any = None
    segment: PhaseSegment = field(init=False)
    compute: Compute = field(init=False, repr=False)
    first_compute: Compute = field(init=False, repr=False)
    recorder: Recorder = field(init=False, repr=False)
    rows: MetricRows = field(init=False, repr=False)
    decision: Decision = field(default_factory=lambda: Decision(()))
    at_evaluation_point: bool = False

    @property
    def config(self) -> JobConfig:
        """The configuration of the job."""
        return self.job.config

    # ---- clock

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[Timer]:
        """Tell heartbeat, profiler and meter what the code inside does; the timer has its seconds at the end."""
        phase = _PHASES.get(name, _Phase())
        if phase.inside:
            self.heartbeat.enter(phase.inside, step)
        with contextlib.ExitStack() as stack:
            stack.enter_context(span(name))
            yield (
                stack.enter_context(self.rows.meter.timed(phase.meter)) if phase.meter else Timer()
            )
        if phase.after:
            self.heartbeat.enter(phase.after, self.progress.step if name == "load" else None)

    # ---- numbers of a step

    def learning_rate(
        self,
        step: int,
        tokens: int,
        segment: PhaseSegment,
        schedule: Callable[[int], float] | None = None,
    ) -> float:
        """The learning rate of a step of a segment, with `tokens` in total, before the factors of groups."""
        factor = (schedule or self.schedule)(self.course.scheduled(step, tokens))
        after_rollbacks = self.progress.policy.lr_factor
        return self.config.optimizer.lr * factor * (segment.lr_multiplier * after_rollbacks)

    def next_rate(self, total_steps: int | None = None) -> float:
        """The learning rate of the next step, before the factors of groups; or that in a run of so many steps."""
        segment = self.course.at(self.loader.next_instance)
        tokens = self.progress.tokens + self.course.batch_of(segment) * segment.seq_len
        schedule = None if total_steps is None else run_schedule(self.config, total_steps)
        return self.learning_rate(self.progress.step + 1, tokens, segment, schedule)

    def label_weight(self, batch: Batch) -> float:
        """This rank's summand of the number that the loss of the step is divided by: one of the ranks that read the same
        rows counts them."""
        if not self.meshes.is_batch_leader:
            return 0.0
        return batch.label_weight if self.objective is None else self.objective.count(batch)

    def count_steps(self) -> None:
        """Set the last step of a length in tokens anew: skipped windows move phases with other steps to earlier ones."""
        skipped, total, done = self.loader.skipped, self.total_tokens, self.progress
        if skipped and total is not None:
            left = total - done.tokens
            more = self.course.steps_of(left, self.loader.cursor, skipped) if left > 0 else 0
            self.total_steps = done.step + more

    # ---- the phases of the data

    def begin_segments(self, compute: Compute) -> None:
        """Begin with the first segment, whose rows `compute` computes."""
        self.segment, self.compute = self.course.segments[0], compute
        self.first_compute = compute

    def enter_segment(self, step: int) -> None:
        """Go to the segment of the next instance, before step `step`; an event says what is new.

        Every rank calls it before it reads a batch. No communication.
        """
        course, instance = self.course, self.loader.next_instance
        before, segment = self.segment, course.at(instance)
        if segment.name == before.name:
            return
        self.segment = segment
        shape = {"seq_len": segment.seq_len, "global_batch": course.batch_of(segment)}
        if shape != {"seq_len": before.seq_len, "global_batch": course.batch_of(before)}:
            config = course.config_of(segment)
            division = micro_batches(config, self.config.parallel.axes(self.meshes.world_size))
            self.loader.rebatch(division.global_batch, division.size, division.count)
            self.compute = make_compute(self.model, config, self.meshes, division, self.objective)
        fields = {"instance": instance, "lr_multiplier": segment.lr_multiplier}
        self.record("phase", step=step, name=segment.name, **shape, **fields)

    # ---- the weights to evaluate

    @contextlib.contextmanager
    def evaluation_point(self) -> Iterator[None]:
        """Swap in the weights to evaluate and save (an average, schedule-free); no effect for other optimizers.

        Changes of the weights inside are kept, as the new weights to evaluate.
        """
        if self.at_evaluation_point:
            yield
            return
        self.switch("eval")
        try:
            yield
        finally:
            self.switch("train")

    def switch(self, point: str) -> None:
        """Call the optimizer's `eval` or `train`, if it trains at other weights than those to evaluate."""
        self.at_evaluation_point = point == "eval"
        switch = getattr(self.optimizer, point, None)
        if switch is not None:
            reshard(self.model)  # weights that are gathered would stay those of the other point
            switch()

    # ---- what is written

    def open_rows(self) -> None:
        """Begin a row of metrics with no step in it."""
        own, parallel = self.objective, self.config.parallel
        sums = loss_columns(self.config) if own is None else own.columns
        self.rows = MetricRows(
            self.device,
            self.meshes.world_size,
            self.total_steps,
            schema=SCHEMA,
            flops=lambda t: self.course.flops(t, self.flops_per_token, self.loader.skipped),
            columns={"sums": sums, **self.extensions.columns()},
            evaluated=self.evaluation.columns,
            # there are figures for bf16 only
            peak=peak_flops(self.device, torch.bfloat16) if parallel.precision == "bf16" else None,
            compiled=parallel.compile,
        )

    def send_row(self) -> None:
        """Write the row that waits, if one does, and call the hook; its numbers have arrived."""
        if self.rows.is_waiting:
            skipped, self.progress.skipped_since_row = self.progress.skipped_since_row, 0
            row = self.rows.finish(skipped)
            self.recorder.write(row)
            self.extensions.call("on_row", row)

    def announce(self, saved: Iterable[int]) -> None:
        """Call the hook of a save for steps that all ranks know to be committed."""
        for step in saved:
            self.extensions.call("on_saved", step, self.folder.checkpoint(step))

    @property
    def prints(self) -> bool:
        """Whether this rank writes lines for a person."""
        return self.meshes.rank == 0 and self.config.metrics.console != "off"

    def report(self, line: str) -> None:
        """Print a line on rank 0, unless `metrics.console` is off."""
        if self.prints:
            with contextlib.suppress(OSError):  # a terminal that is gone
                print(line, flush=True)

    def record(self, event: str, **fields: Any) -> None:
        """Append an event to the journal."""
        self.recorder.record(event, **fields)

    def record_quarantine(self, found: Iterable[tuple[int, str]]) -> None:
        """Append the events of checkpoints that were damaged."""
        for step, reason in found:
            self.record("quarantine", step=step, reason=reason)
