"""Train a step of a run again, exactly, and look at it: the run's folder is only read."""

from __future__ import annotations

import bdb
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_data import Batch
from forge_lab._shared.problems import invalid, problems_of
from forge_lab.study.journal import read_journal
from forge_lab.study.private_job import find_start, private_job
from forge_lab.study.seen import SeenRow, seen_rows
from forge_parallel import StartError, launch
from forge_resilience import ExitCode, StopSignal
from forge_resilience.policy import Outcome
from forge_train import Callback, ResolvedJob, RunDirectory, Trainer, read_rows
from forge_train.errors import ConfigError, JobError, NumericsError, StateError
from forge_train.toolkit import skip_windows

#: Numbers of a row that a replay has to give again.
COMPARED = ("loss", "grad_norm", "lr", "instances")

_COMPUTES = ("parallel.", "train.", "model.", "optimizer.", "schedule.", "data.", "resilience.non", "resilience.spike.", "resilience.roll")  # fmt: skip

#: Called with the Trainer before a step; a context manager that it returns is left behind the step.
Hook = Callable[[Trainer], Any]


class Visitor:
    """Looks at steps of a replay, on every rank; all methods do nothing."""

    def step(self, trainer: Replay) -> contextlib.AbstractContextManager[Any]:
        """Around each step from the first visited one on."""
        return contextlib.nullcontext()

    def gradients(self, trainer: Replay) -> None:
        """In a visited step, when its gradients are those of the global batch, before they are clipped."""

    def end(self, trainer: Replay) -> None:
        """Behind the last step and its callbacks."""


class _Rows(Callback):
    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Any]] = {}

    def on_log(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        self.by_step[row["step"]] = dict(row)


class Replay(Trainer):
    """Trains the private job of a run up to the step `last`, and saves, evaluates and probes nothing. `visitor` sees the
    steps from `first` on, whose rows are in `rows_by_step`; `batch` holds this rank's rows of the last step."""

    def __init__(
        self, run: Path, job: ResolvedJob, first: int, last: int, visitor: Visitor
    ) -> None:
        found = _Rows()
        super().__init__(job, [found])
        self.rows_by_step = found.by_step
        self.first, self.last, self.visitor = first, last, visitor
        self._rollbacks = {event["to_step"]: event for event in read_journal(run).rollbacks}
        self.batch: Batch | None = None
        if not 1 <= first <= last <= self.total_steps:
            rule = f"must be from 1 to {self.total_steps}, the steps of this run"
            raise invalid("--step", "range", last, rule, "name one of them", kind=ConfigError)

    def train_step(self) -> None:
        """One step, inside of what the visitor puts around it; without the data that a rollback of the run left out."""
        back = self._rollbacks.get(self.progress.step)
        if back is not None:
            skip_windows(self.loader, back["skipped_instances"])
            self.numerics.policy.rollbacks = back["rollbacks"]
        if self.progress.step + 1 < self.first:
            super().train_step()
            return
        with self.visitor.step(self):
            super().train_step()

    def _next_batch(self) -> tuple[Batch, Exception | None]:
        self.batch, fault = super()._next_batch()
        return self.batch, fault

    def _forward_backward(self, batch: Batch, fault: Exception | None = None) -> torch.Tensor:
        share = super()._forward_backward(batch, fault)
        if self.progress.step + 1 >= self.first:
            self.visitor.gradients(self)
        return share

    def _goes_on(self) -> bool:
        return self.progress.step < self.last and super()._goes_on()

    def _after_step(self) -> None:
        for callback in self.callbacks:
            callback.after_step(self.progress.step)

    def _save(self, wait: bool) -> None:
        pass  # nor the initial state, to which a rollback would go

    def _roll_back(self, bad: Outcome) -> None:
        raise NumericsError(
            [f"the replay has bad numbers ({bad.cause}) in steps {bad.first} to {bad.last}, of which the run's journal has no "
             f"rollback; look at step {bad.first} itself"]
        )  # fmt: skip

    def _evaluation_due(self) -> bool:
        return super()._evaluation_due() or self.progress.step >= self.first

    def _finish(self) -> None:
        self._send_row()
        if self.progress.step < self.last:
            stopped = JobError([f"stopped by a signal behind step {self.progress.step}"])
            stopped.exit_code = ExitCode.REQUEUE
            raise stopped
        self.visitor.end(self)


@dataclass(frozen=True)
class Replayed:
    """A step that was trained again.

    `row` has its numbers as a row of metrics.jsonl, `logged` the row of the run, None where it has none. `seen` are
    the rows of the global batch with their documents. `start` is the step of the checkpoint that the replay began from, 0
    for the initial state. `changed` has what was not so when the run trained the step, {key: [value then, value here]}.
    `trainer` is as it was left behind the step; its parts stay usable on one process.
    """

    step: int
    start: int
    row: Mapping[str, Any]
    logged: Mapping[str, Any] | None
    seen: Sequence[SeenRow]
    changed: Mapping[str, list[Any]] = field(repr=False)
    trainer: Replay = field(repr=False)

    @property
    def differs(self) -> dict[str, tuple[Any, Any]]:
        """{name: (logged, replayed)} of the compared numbers that are not the same bits."""
        if self.logged is None:
            return {}
        pairs = {n: (self.logged.get(n), self.row.get(n)) for n in COMPARED}
        return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}


class _OneStep(Visitor):
    """Anomaly mode, hooks and a breakpoint around one step."""

    def __init__(self, hooks: Sequence[Hook], anomaly: bool, debugger: bool) -> None:
        self.hooks, self.anomaly, self.debugger = hooks, anomaly, debugger
        self.seen: list[SeenRow] = []

    @contextlib.contextmanager
    def step(self, trainer: Replay) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                found = hook(trainer)
                if isinstance(found, contextlib.AbstractContextManager):
                    stack.enter_context(found)
            if self.anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            if self.debugger:
                breakpoint()  # `next` trains the step
            yield
        self.seen = seen_rows(trainer)


def replay_step(
    run: str | Path,
    step: int,
    *,
    hooks: Sequence[Hook] = (),
    anomaly: bool = False,
    debugger: bool = False,
    callbacks: bool = False,
    settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
) -> Replayed:
    """Train step `step` of a run again, from its newest checkpoint before that step, or else from its initial state.

        found = replay_step("runs/mine", 37, hooks=[lambda trainer: store.watch(trainer.model)])
        found.differs       # {} : loss, norm, rate and data are those that the run logged, bit for bit

    On the layout of the run the step is the run's, bit for bit. `settings` may name another layout (dotted keys). Nothing
    is saved, evaluated or sent to sinks; callbacks of the job are off unless `callbacks`, as they may act outside. What the
    trainer writes (its configuration, events) lies in `output`, by default a temporary folder. Under a launcher every
    rank calls it with the same new `output`, which all of them share.

    Costs the steps from the checkpoint on. Raises ConfigError and StateError.
    """
    visitor = _OneStep(hooks, anomaly, debugger)
    start = find_start(Path(run), step)
    with private_folder(run, output) as folder:
        job = private_job(Path(run), start, folder, settings, callbacks)
        try:
            trainer = train_again(Path(run), job, step, step, visitor)
        except bdb.BdbQuit:
            raise JobError([f"the debugger was left before the end of step {step}"]) from None
    logged = logged_rows(Path(run)).get(step)
    changed = changed_since(Path(run), step, job, trainer.meshes.world_size)
    return Replayed(step, start, trainer.rows_by_step[step], logged, visitor.seen, changed, trainer)


def train_again(run: Path, job: ResolvedJob, first: int, last: int, visitor: Visitor) -> Replay:
    """Train the private job of a run to the end of step `last`; the group of ranks is that of the process, or is begun and
    ended."""
    trainer = Replay(run, job, first, last, visitor)
    try:
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopSignal(announce=False))  # nothing is saved
            begun = dist.is_initialized()
            meshes = (
                None
                if begun
                else stack.enter_context(
                    launch(job.config.parallel, {"configuration": job.digest()})
                )
            )
            trainer.fit(meshes, stop)
    except StartError as error:
        failure = JobError(problems_of(error))
        failure.shared = error.shared
        raise failure from error
    return trainer


@contextlib.contextmanager
def private_folder(run: str | Path, output: str | Path | None) -> Iterator[Path]:
    """`output`, which must be new and outside of the run, or a temporary folder."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="forge-replay-") as temporary:
            yield Path(temporary)
        return
    folder, inside = Path(output), Path(run).resolve()
    if inside in (folder.resolve(), *folder.resolve().parents):
        rule, fix = f"must be outside of {run}, which is only read", "name a folder elsewhere"
        raise invalid("--output", "inside", str(output), rule, fix, kind=ConfigError)
    if RunDirectory(folder).config.exists():
        rule, fix = "holds a replay or a run already", "name a new folder"
        raise invalid("--output", "exists", str(output), rule, fix, kind=StateError)
    yield folder


def logged_rows(run: Path) -> dict[int, dict[str, Any]]:
    """Rows of a run's metrics.jsonl by step."""
    path = RunDirectory(run).metrics
    return {row["step"]: row for row in read_rows(path)} if path.exists() else {}


def changed_since(run: Path, step: int, job: ResolvedJob, ranks: int) -> dict[str, list[Any]]:
    """{key: [value when the run trained `step`, value here]} of `world_size` and the keys that say how a step is
    computed."""
    journal = read_journal(run)
    found = {"world_size": [journal.world_size_of(step) or ranks, ranks]}
    found |= {k: v for k, v in journal.changed_since(step).items() if k.startswith(_COMPUTES)}
    for key, (before, now) in RunDirectory(run).changes(job).items():
        if key.startswith(_COMPUTES):
            found[key] = [found.get(key, [before])[0], now]
    return {key: values for key, values in found.items() if values[0] != values[1]}
