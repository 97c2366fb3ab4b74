"""The training loop. `fit` is the life of a run, `train_step` the life of a batch."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from forge_ckpt import SaveEvent, Store
from forge_core import flops_per_token
from forge_core.optim import set_lr
from forge_core.optim.older import changes_of_older_run
from forge_data import Batch
from forge_data.differences import difference_lines
from forge_data.packing import packing_report
from forge_data.phases import PhaseSegment
from forge_parallel import (
    Meshes,
    clip_grads_,
    find_world,
    global_grad_norm,
    make_meshes,
    reshard,
    select_device,
)
from forge_parallel.compute import Compute
from forge_parallel.profile import span
from forge_resilience import Agreement, Decision, ExitCode, StopSignal, Vote
from forge_resilience.heartbeat import Heartbeat
from forge_resilience.policy import Outcome
from forge_train._shared.problems import invalid
from forge_train.config.resolve import ResolvedJob, schedule_warnings
from forge_train.errors import (
    ConfigError,
    JobError,
    NumericsError,
    config_errors,
    refuse,
    run_on_all_ranks,
)
from forge_train.extensions.built_in import extensions_of
from forge_train.extensions.callback import Callback, hook_problems, load_callbacks, state_keys
from forge_train.extensions.extension import Extension, Extensions, Run, RunView
from forge_train.metrics.rows import Columns, MetricRows, finite
from forge_train.trainer.alerts import alerts
from forge_train.trainer.assemble import assemble, seed_rank
from forge_train.trainer.auto_layout import describe_placement, with_layout
from forge_train.trainer.begin_tokens import begin_problems, is_older
from forge_train.trainer.build import (
    build_trained,
    freeze_groups,
    open_data,
    run_schedule,
    total_steps,
    total_tokens,
)
from forge_train.trainer.check_model import model_problems
from forge_train.trainer.checkpoints import Check, Checkpoints, checkpoint_state, share_places
from forge_train.trainer.compute import make_compute
from forge_train.trainer.course import Course
from forge_train.trainer.encoder_source import find_encoder
from forge_train.trainer.evaluation import Evaluation
from forge_train.trainer.fork import find_fork
from forge_train.trainer.layout import layout_problems, micro_batches, remarks
from forge_train.trainer.lives import last_rate, life_fields
from forge_train.trainer.numerics import (
    Numerics,
    Rollback,
    raise_without_saves,
    refuse_without_checkpoint,
)
from forge_train.trainer.objective import loss_columns
from forge_train.trainer.phases import Phases
from forge_train.trainer.progress import Progress
from forge_train.trainer.recorder import Recorder
from forge_train.trainer.rollback import instances_of_steps, skip_windows
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.store_errors import store_errors
from forge_train.trainer.vote import PendingCount, fault_code

#: Keys, or how they begin, that the learning rate of a step depends on.
_KEYS_OF_RATES = ("train.steps", "train.tokens", "train.global_batch", "schedule.", "optimizer.lr")

#: Attributes that a Run shows since 0.2.0.
_MOVED = frozenset({"agreement", "device", "heartbeat"})


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `val_loss` is in nats per token, None without validation data."""

    exit_code: ExitCode
    step: int
    val_loss: float | None


class Trainer:
    """Trains a resolved job, from the newest checkpoint of its run directory, else from what [init] names.

        job = forge_train.load_job("config.toml")
        result = Trainer(job, callbacks=[MyCallback()]).fit()

    One process, or one rank of many: under a launcher each rank makes its own, and all decisions are
    taken together. Callbacks run on every rank; files are written by rank 0.

        trainer = Trainer(job)
        with launch(trainer.config.parallel) as meshes:     # layout = "auto" is chosen there
            result = trainer.fit(meshes)

    until: the last step to train, where the run is longer: it ends as after a stop.
    saves: whether there are checkpoints. Without, bad steps that need one to go back to raise NumericsError, and those at the
    end are not judged.
    evaluates: whether validation data is evaluated.

    Raises JobError (ConfigError, DataError, StateError), before anything is started if possible.
    Public: job, config, model, optimizer, loader, progress, total_steps, paths, meshes, and `run`, which shows what
    extensions may read. agreement, device and heartbeat are attributes of `run`; 0.3.0 removes them here.
    """

    def __init__(
        self,
        job: ResolvedJob,
        extensions: Sequence[Extension] = (),
        *,
        callbacks: Sequence[Callback] = (),
        until: int | None = None,
        saves: bool = True,
        evaluates: bool = True,
    ) -> None:
        self.run = cast(Run, RunView(self))
        self._heartbeat = Heartbeat.from_environ()
        with config_errors():
            world = find_world()
        self._rank = world.rank
        self.job, reasons = with_layout(job, world)
        self.config = config = self.job.config
        refuse(layout_problems(config, world.world_size, world.local_world_size))
        self._callbacks = [*extensions, *callbacks, *load_callbacks(config.callbacks)]
        refuse(hook_problems(self._callbacks))
        for callback in self._callbacks:
            if isinstance(callback, Callback):
                callback.trainer = self
        self.paths = RunDirectory(config.run.dir)
        with config_errors("parallel"):
            self._device = select_device(config.parallel.device)
        layout = config.parallel.axes(world.world_size)
        self.model = build_trained(config)
        refuse(model_problems(self.model, config, layout))
        self._extensions = Extensions(
            extensions_of(config, self.model, self._callbacks), self._callbacks, self._reshard
        )
        state_keys(self._extensions)
        self._course = Course(config)
        self.total_steps = total_steps(config, self.model)
        self._total_tokens = total_tokens(config, self.model)
        if until is not None and not 1 <= until <= self.total_steps:
            rule = f"must be from 1 to {self.total_steps}, the steps of the run"
            raise invalid("until", "range", until, rule, kind=ConfigError)
        self._until, self._saves, self._evaluates = until, saves, evaluates
        refuse(self._extensions.problems(config, world.world_size, self.total_steps))
        freeze_groups(self.model, config)
        with config_errors("schedule"):
            self._schedule = run_schedule(config, self.total_steps)
        self._reasons = [*reasons, *remarks(config, layout)]
        self._placement = describe_placement(config.parallel, world, self.model)
        self._flops = [flops_per_token(self.model, s.seq_len) for s in self._course.segments]
        self._division = micro_batches(config, layout)
        refuse(begin_problems(self.job, self.paths))  # before texts are tokenized again
        self.loader, held_out = open_data(config, self.model, layout, world.rank)
        self._evaluation = Evaluation(config, held_out)
        self._source_lines = list(getattr(self.loader.stream, "source_lines", ()))
        self._data_notes = list(getattr(self.loader.stream, "remarks", ()))
        for key, stream in held_out.items():
            self._data_notes += [f"{key}: {line}" for line in getattr(stream, "remarks", ())]
        self.loader.on_event = self._record_data
        self._fork = find_fork(self.job, self.model, self.loader, self.total_steps)
        self._optimizer_notes = self._changes_of_older_run()
        self._encoder = find_encoder(config, self.model, self._fork)
        self._numerics = Numerics(config.resilience, self._record)
        self.progress = Progress(self._numerics.policy, world.world_size)
        self._val_loss: float | None = None
        self._agreement = Agreement()
        self._meshes: Meshes | None = None
        self._copies: torch.cuda.Stream | None = None
        self._stop = StopSignal()
        self._decision = Decision(())
        self._save_requested = False
        self._last_evaluated, self._found = -1, dict[str, float]()
        self._at_evaluation_point = False

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            if name not in _MOVED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            use = f"Trainer.{name}: use Trainer.run.{name}"
            warnings.warn(use, DeprecationWarning, stacklevel=2)
            return getattr(self.run, name)

    @property
    def meshes(self) -> Meshes:
        """This rank's place in the meshes of the job. RuntimeError before `fit` or `prepare`."""
        if self._meshes is None:
            raise RuntimeError("meshes: there are none before fit or prepare")
        return self._meshes

    def prepare(self, meshes: Meshes | None = None) -> None:
        """Build, shard and initialize the model and what trains it, without training; for tests. Collective.

        `meshes` as for `fit`.
        """
        self._join(meshes)
        self._materialise()

    def request_save(self) -> None:
        """Ask, on any rank, for a checkpoint after the next step."""
        self._save_requested = True

    @contextlib.contextmanager
    def evaluation_point(self) -> Iterator[None]:
        """The weights that are evaluated and saved, where the optimizer trains at others; else it does nothing.

            with trainer.evaluation_point():        # between steps, on every rank
                accuracy = my_evaluation(trainer.model)

        What is written into the weights meanwhile is kept, as the new point to evaluate.
        """
        if self._at_evaluation_point:
            yield
            return
        self._switch("eval")
        try:
            yield
        finally:
            self._switch("train")

    @property
    def _compute(self) -> Compute:
        """Forward and backward of the rows of this phase."""
        return self._phases.compute

    def _switch(self, point: str) -> None:
        """Call the optimizer's `eval` or `train`, if it trains at other weights than those to evaluate."""
        self._at_evaluation_point = point == "eval"
        switch = getattr(self.optimizer, point, None)
        if switch is not None:
            reshard(self.model)  # weights that are gathered would stay those of the other point
            switch()

    # ---- the life of a run

    def fit(self, meshes: Meshes | None = None, stop: StopSignal | None = None) -> RunResult:
        """Train to the end or to a stop signal, and save.

        `meshes` come from `forge_parallel.launch`, by default from the running process group or one
        process. `stop` is a StopSignal that is open already; by default one is opened here. On many
        ranks a JobError is raised by all of them. The model is left as it is evaluated and saved.
        """
        try:
            self._join(meshes)
            return self._open_and_fit(stop)
        except JobError as error:
            error.shared = True
            raise
        finally:
            self.loader.close()

    def _join(self, meshes: Meshes | None) -> None:
        """Take this rank's place in the meshes, by default of the running process group or one process."""
        if meshes is None:
            with config_errors():
                meshes = make_meshes(self.config.parallel, self._device)
        if meshes.batch_size != self.loader.world_size:
            rule = f"data ranks must be {self.loader.world_size}, those of the environment"
            fix = "start the process group with forge_parallel.launch, or set RANK and WORLD_SIZE of it"
            raise invalid("meshes", "mismatch", meshes.batch_size, rule, fix, kind=ConfigError)
        self._meshes = meshes
        self._agreement = Agreement(meshes.host_group)

    def _open_and_fit(self, stop: StopSignal | None) -> RunResult:
        """Open the objects that `close` closes after any error, and refuse another experiment's folder."""
        rank = self.meshes.rank
        run_on_all_ranks(self._agreement, lambda: self.paths.create(rank))
        with contextlib.ExitStack() as stack:
            stack.enter_context(alerts(self.paths, self.config.resilience.alerts, rank))
            with store_errors(self.paths.checkpoints, ConfigError):
                store = self._open_store()
            stack.enter_context(store)
            self._stop = stop or stack.enter_context(StopSignal(announce=rank == 0))
            changes = run_on_all_ranks(
                self._agreement, lambda: self.paths.allowed_changes(self.job)
            )
            return self._fit(store, changes)

    def _open_store(self) -> Store:
        config = self.config.checkpoint
        return Store(
            self.paths.checkpoints,
            group=self.meshes.host_group,
            keep=config.keep(),
            digest=config.digest,
            staging_gib=config.staging_gib,
            on_event=self._record_save,
            max_failures=config.max_failed_saves,
        )

    def _fit(self, store: Store, changes: dict[str, list[Any]]) -> RunResult:
        self._materialise()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._extensions.around("around_run", self.run))
            self._resume(store, changes, stack)
            self._extensions.call("start", self.run)
            self._count_steps()  # a callback may leave out data
            self._rows = self._metric_rows()
            if self.config.eval.at_start and self.progress.step == 0:
                self._evaluate()
            while not self._reach_the_end():
                pass  # after a rollback
        self._switch("eval")
        finished = self.progress.step >= self.total_steps
        code = ExitCode.DONE if finished else ExitCode.REQUEUE
        return RunResult(code, self.progress.step, self._val_loss)

    def _reach_the_end(self) -> bool:
        """Train until the run is over; False if it went back to a checkpoint instead."""
        try:
            if self._numerics.policy.can_roll_back and self._checkpoints.last_step < 0:
                self._save(self.config.checkpoint.wait)  # the initial state, to go back to
            while self._goes_on():
                with self._extensions.around("around_step", self.progress.step + 1):
                    self.train_step()
                    self._after_step()
            self._finish()
        except Rollback as found:
            self._roll_back(found.outcome)
            return False
        return True

    def _goes_on(self) -> bool:
        """Whether there is another step to train."""
        last = self.total_steps if self._until is None else min(self._until, self.total_steps)
        return self.progress.step < last and self._decision.stop is None

    def _roll_back(self, bad: Outcome) -> None:
        """Load a checkpoint from before the bad steps, and leave their data out of the stream. Collective.

        A kill on the way loses nothing: the next life comes to the same steps, and goes back again.
        """
        if not self._saves:
            raise_without_saves(bad)
        self._heartbeat.enter("load")
        self._numerics.refuse_more_rollbacks(bad, self._checkpoints.last_step)
        self._announce(self._checkpoints.settle())
        at, rollbacks = self.progress.step, self._numerics.policy.rollbacks + 1
        before = self.config.resilience.rollback.batches_before
        found = instances_of_steps(
            self.loader, self._course, self.progress, bad.first - before, bad.last
        )
        windows = [*self.loader.skipped, found]
        known = len(self._checkpoints.set_aside)
        with self.evaluation_point():
            seconds = self._checkpoints.go_back(bad.first - 1, bad.first - 1 - before)
        self._record_quarantine(known)
        if seconds is None:
            refuse_without_checkpoint(bad, self.paths.checkpoints)
        self._numerics.policy.rollbacks = rollbacks
        skip_windows(self.loader, windows)
        self._count_steps()
        self._forget_steps()
        self._record(
            "rollback",
            step=at,
            to_step=self.progress.step,
            cause=bad.cause,
            bad_steps=[bad.first, bad.last],
            skipped_instances=self.loader.skipped,
            total_steps=self.total_steps,
            rollbacks=rollbacks,
            seconds=round(seconds, 4),
        )
        self._extensions.call("after_rollback", self.progress.step)

    def _count_steps(self) -> None:
        """Set the last step of a length in tokens anew: skipped windows move phases with other steps to earlier ones."""
        skipped, total = self.loader.skipped, self._total_tokens
        if skipped and total is not None:
            left, step = total - self.progress.tokens, self.progress.step
            more = self._course.steps_of(left, self.loader.cursor, skipped) if left > 0 else 0
            self.total_steps = step + more

    def _record_quarantine(self, known: int) -> None:
        """Events of the damaged checkpoints behind the first `known` ones."""
        for step, reason in self._checkpoints.set_aside[known:]:
            self._record("quarantine", step=step, reason=reason)

    def _forget_steps(self) -> None:
        """Drop what is left of the steps behind the checkpoint that was loaded: their rows are cut off."""
        self.optimizer.zero_grad()
        self._restore_counts()
        self._last_evaluated, self._val_loss = -1, None
        self._recorder.reopen(self.progress.step, self.total_steps)
        self._rows = self._metric_rows()

    def _restore_counts(self) -> None:
        """Take up what the loaded checkpoint counted since the row before it, in place of what was counted here."""
        self._numerics.since_row = self.progress.skipped_since_row

    def _materialise(self) -> None:
        """Shard and initialise the model, and build what trains it. Collective."""
        report = self._report if self._prints else None
        parts = assemble(
            self.model, self.config, self.meshes, self._division, self._agreement, report
        )
        self.model, self._tensor_names = parts.model, parts.tensor_names
        self._objective = parts.objective
        if self._device.type == "cuda":  # copies overlap with the step before
            self._copies = torch.cuda.Stream(self._device)
        self.optimizer, self._masks_update = parts.optimizer, parts.masks_update
        self._phases = self._begin_phases(parts.compute)
        seed_rank(self.config.run.seed, self.meshes)

    def _begin_phases(self, compute: Compute) -> Phases:
        config, meshes = self.config, self.meshes
        layout = config.parallel.axes(meshes.world_size)
        return Phases(
            self._course,
            self.loader,
            self._division,
            compute,
            lambda job, division: make_compute(self.model, job, meshes, division, self._objective),
            lambda job: micro_batches(job, layout),
            self._record,
        )

    def _resume(
        self, store: Store, changes: dict[str, list[Any]], stack: contextlib.ExitStack
    ) -> None:
        """Load the newest good checkpoint, and open the files of this life of the run, which `stack` closes. Collective."""
        self._heartbeat.enter("load")
        fork = self._fork
        if fork is not None:
            changes = {**changes, **(fork.changed or {})}
        with self.evaluation_point():
            self._checkpoints = self._open_checkpoints(store)
            begins = self._fork is not None or self._encoder is not None
            seconds = self._checkpoints.load(self._begin if begins else None)
        if (
            self._checkpoints.last_step >= 0
        ):  # a file system may have shown this run's own step late
            fork = self._fork = self._encoder = None
        self._restore_counts()
        self._count_steps()
        self._heartbeat.enter("start", self.progress.step)
        if "train.global_batch" in changes:  # bad steps up to here had other instances than it says
            self._numerics.policy.forget_bad_steps()
        step, writes = self.progress.step, self.meshes.rank == 0
        life = life_fields(self.paths, self.progress) if writes else {}
        news = _changes_rates(changes) if writes and step < self.total_steps else []
        last = last_rate(self.paths, step) if news else None
        rates = [last, (step + 1, self._next_rate())] if last else []
        hosts = self._agreement.exchange(self.paths.host)
        run_on_all_ranks(self._agreement, lambda: self._record_life(hosts) if writes else None)
        again = self.config.eval.at_start and step == 0
        behind = -1 if again else step  # the row of step 0 is written again
        self._recorder = Recorder(self.paths, self.config.metrics, behind, self.total_steps, writes)
        stack.callback(self._recorder.close)
        self._record_quarantine(0)
        for line in [*self._reasons, *self._placement]:
            self._report(f"layout: {line}")
        for line in schedule_warnings(self.config):
            self._report(f"schedule: {line}")
        for line in [*self._source_lines, *self._data_notes]:
            self._report(f"data: {line}")
        for line in difference_lines(self.loader.changed):
            self._report(f"data: {line}, accepted")
        if step and fork is None:
            self._report(f"resume: from step {step} of {self.total_steps}")
            for key, (was, now) in changes.items():
                self._report(f"resume: {key} was {was!r} and is {now!r}")
        if rates:
            before, after = (f"{rate:.4g} in step {at}" for at, rate in rates)
            keys = ", ".join(news)
            self._report(f"resume: the learning rate was {before} and is {after} ({keys} changed)")
        for line in [] if fork is None else fork.lines():
            self._report(f"init: {line}")
        for line in self._optimizer_notes:
            self._report(f"optimizer: {line}")
        if self._encoder is not None:
            self._report(f"init: {self._encoder.line()}")
        event: dict[str, Any] = {
            "step": step,
            "total_steps": self.total_steps,
            "device": str(self._device),
            "world_size": self.meshes.world_size,
            **life,
        }
        if self.meshes.world_size > 1:
            event |= {"layout": self._placement, "reasons": self._reasons}
        if self._source_lines:
            event["sources"] = self._source_lines
        if self._data_notes:
            event["data"] = self._data_notes
        if self._optimizer_notes:
            event["optimizer"] = self._optimizer_notes
        if self.loader.changed:
            event["data_changed"] = self.loader.changed
        packing = packing_report(self.loader.stream)
        if packing:
            event["packing"] = packing
        if self._encoder is not None:
            self._record("encoder", step=step, **self._encoder.event())
        if fork is not None:
            self._record("fork", step=step, **fork.event())
            self._record("start", **event, seconds=seconds)
        elif step:
            self._record("resume", **event, seconds=seconds, changed=changes, learning_rates=rates)
        else:
            self._record("start", **event)

    def _changes_of_older_run(self) -> list[str]:
        """What the optimizer does otherwise than in the older run that it goes on from."""
        source, run = None if self._fork is None else self._fork.source.run, self.paths
        if source is not None and "optimizer" in self.config.init.keep:
            run = RunDirectory(source)
        return changes_of_older_run(self.model, self.config.optimizer) if is_older(run) else []

    def _begin(self, state: dict[str, Any], check: Check) -> None:
        """Fill the state of a run that begins with weights of others. Collective."""
        if self._fork is not None:
            self._fork.load(
                state, check, model=self.model, meshes=self.meshes, agreement=self._agreement
            )
        if self._encoder is not None:
            self._encoder.load(self.model, self._agreement)

    def _record_life(self, hosts: Sequence[str]) -> None:
        """Write how this life of the run was made, and, of a fork, what from."""
        if self._fork is not None:
            self._fork.write(self.paths.path)
        self.paths.record(self.job, hosts, None if self._fork is None else self._fork.parent())

    def _open_checkpoints(self, store: Store) -> Checkpoints:
        state = checkpoint_state(
            self.model,
            self.optimizer,
            self.loader,
            self.progress,
            self._extensions,
            self._tensor_names,
            self.meshes,
        )

        return Checkpoints(
            store,
            self.config.checkpoint,
            self._extensions.checkpoint_objects(state),
            self._course.tokens,
            lambda step: self._extensions.call("after_load", step),
        )

    # ---- the life of a batch

    def train_step(self) -> None:
        """One optimizer step on one global batch. No device synchronisation here."""
        step = self.progress.step + 1  # steps are counted from 1
        self._extensions.call("before_batch", step)
        start = self.loader.cursor
        self._phases.enter(step)
        self._heartbeat.enter("data", step)
        with span("data"), self._rows.meter.waiting():
            batch, fault = self._next_batch()
        self._heartbeat.enter("step")
        self._extensions.call("before_forward", step, batch)
        tokens = (self.loader.cursor - start) * self._phases.segment.seq_len  # filler is not data
        lr = self._learning_rate(step, self.progress.tokens + tokens, self._phases.segment)
        self._checkpoints.listen()
        with span("forward_backward"):
            with self._extensions.around("around_backward", step):
                share = self._forward_backward(batch, fault)
            self._extensions.call("after_backward", step, batch)
        with span("grad_norm"):
            grad_norm, sums = global_grad_norm(self._compute.counted, sums=share)
            assert sums is not None
            loss = sums[0]  # of the global batch, on every rank
            clip_grads_(self._compute.parameters, grad_norm, self.config.train.max_grad_norm)
        if self._rows.is_waiting:
            self._check_numerics()  # up to the row's step, before weights change once more
            self._send_row()  # hooks see the weights of the row's step
        set_lr(self.optimizer, lr)
        labeled = self._decision.count > 0
        bad = self._numerics.policy.judge(loss, grad_norm, labeled=labeled)
        if not labeled:  # no label is not a loss of 0: such numbers are null
            loss, sums = loss.new_full((), math.nan), torch.full_like(sums, math.nan)
        with span("optimizer"):
            self._update(bad)
        self._extensions.call("after_update", step, bad)
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += tokens
        self._rows.meter.count(tokens)
        if self._row_due():
            numbers = {
                "loss": loss,
                "grad_norm": grad_norm,
                "verdicts": self._numerics.take(),
                "sums": sums[1:],
                **self._extensions.numbers(step),
            }
            self._rows.begin(self.progress, lr, batch.digest, numbers)

    def _next_rate(self, total_steps: int | None = None) -> float:
        """The learning rate of the next step, before the factors of groups; or that in a run of so many steps."""
        segment = self._course.at(self.loader.next_instance)
        tokens = self.progress.tokens + self._course.batch_of(segment) * segment.seq_len
        schedule = self._schedule if total_steps is None else run_schedule(self.config, total_steps)
        return self._learning_rate(self.progress.step + 1, tokens, segment, schedule)

    def _learning_rate(
        self,
        step: int,
        tokens: int,
        segment: PhaseSegment,
        schedule: Callable[[int], float] | None = None,
    ) -> float:
        """That of step `step` of a segment, with `tokens` in all, before the factors of groups."""
        factor = (schedule or self._schedule)(self._course.scheduled(step, tokens))
        return (
            self.config.optimizer.lr
            * factor
            * (segment.lr_multiplier * self._numerics.policy.lr_factor)
        )

    def _next_batch(self) -> tuple[Batch, Exception | None]:
        """This rank's share; filler and the error if it cannot be read, which the vote tells the others."""
        try:
            batch = next(self.loader)
            if self._copies is not None:
                batch = batch.staged(self._copies, self._compute.host_names(batch))
            return batch, None
        except Exception as error:
            return self.loader.filler(self.loader.micro_batch), error

    def _forward_backward(self, batch: Batch, fault: Exception | None = None) -> torch.Tensor:
        """This rank's share of the loss of the global batch, and of an objective's other sums: (k,).

        Gradients come out as those of one mean over the step's valid labels. The ranks' votes travel
        between hosts while the first micro-batch goes forward, and are awaited before its loss.
        """
        # taken here, so that a request of a hook outlives a save that is due at the same step
        requested, self._save_requested = self._save_requested, False
        vote = Vote(
            stop=self._stop.number,
            save=requested or self._checkpoints.wants_retry,
            saved=self._checkpoints.committed,
            fault=int(fault_code(fault)),
            digest=batch.digest,
            count=self._label_weight(batch),
            counts=self._extensions.token_counts(batch),
        )
        step, counted = self.progress.step, self._extensions.set_token_counts
        pending = PendingCount(self._agreement, vote, fault, step, self._record, counted)
        share = self._compute.gradients(batch, pending.wait)
        assert pending.decision is not None
        self._decision = pending.decision
        return share

    def _label_weight(self, batch: Batch) -> float:
        """This rank's summand of the normaliser: one of the ranks that read the same rows counts them."""
        if not self.meshes.is_batch_leader:
            return 0.0
        return batch.label_weight if self._objective is None else self._objective.count(batch)

    def _update(self, bad: torch.Tensor) -> None:
        """The optimizer's step, masked on every rank alike where the numbers are bad."""
        if self._masks_update:
            self.optimizer.step(skip=bad)
        elif not float(bad):  # an optimizer without a mask costs a host sync
            self.optimizer.step()

    # ---- between steps

    def _after_step(self) -> None:
        self._announce(self._checkpoints.announce(self._decision.saved))
        self._extensions.call("after_step", self.progress.step)
        if self._evaluation_due():
            self._evaluate()
        if self._due(self.config.checkpoint.every_steps) or self._decision.save:
            self._save(self.config.checkpoint.wait)

    def _finish(self) -> None:
        """Evaluate and save the last step, whatever the intervals; save that of a stop."""
        finished = self.progress.step >= self.total_steps
        if finished:
            self._evaluate()
        self._save(wait=True)
        self._send_row()  # of a run that saves nothing
        self._heartbeat.enter("exit")
        if finished:
            self._record("done", step=self.progress.step)
        elif self._decision.stop is not None:
            rank, number = self._decision.stop
            name = StopSignal.name_of(number)
            self._record("stop", step=self.progress.step, signal=name, rank=rank)
        self._extensions.call("finish")

    def _row_due(self) -> bool:
        """Whether the step that was just done has a row."""
        due = self._due(self.config.metrics.every_steps) or self._evaluation_due()
        return due or self._extensions.wants_row(self.progress.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _evaluation_due(self) -> bool:
        """At the interval and at the last step; such a step has a row in any case."""
        last = self.progress.step == self.total_steps
        return last or self._evaluation.due(self.progress.step, last)

    def _evaluate(self) -> None:
        step = self.progress.step
        last = step == self.total_steps
        due = self._evaluates and self._evaluation.due(step, last)
        if self._last_evaluated == step or not due:
            return
        self._heartbeat.enter("evaluate")
        with span("evaluate"), self._rows.meter.paused() as pause, self.evaluation_point():
            found = self._evaluation(
                self._phases.evaluates, self._label_weight, self._agreement, step, last
            )
        self._extensions.call("after_evaluation")
        self._last_evaluated, self._found = step, found
        self._val_loss = found.get("val_loss", self._val_loss)
        if step:
            self._rows.update(found)
        else:
            row = self._rows.at_start(found)
            self._recorder.write(row)
            self._extensions.call("on_row", row)
        self._record("evaluation", step=step, **finite(found), seconds=pause.seconds)
        for name, loss in self._evaluation.losses(found).items():
            self._extensions.call("on_evaluated", name, loss)

    def _save(self, wait: bool) -> None:
        """Save this step, on all ranks; not after more bad steps than are allowed. A save before is committed first."""
        if self._saves:
            with span("save"):
                self._save_step(wait)

    def _save_step(self, wait: bool) -> None:
        step = self.progress.step
        self._heartbeat.enter("save")
        with self._rows.meter.paused() as settling:
            self._announce(self._checkpoints.settle())
        if self._checkpoints.last_step == step:
            return
        self._check_numerics()
        self._send_row()
        self._extensions.call("before_save", step)
        loss = self._found.get("val_loss") if self._last_evaluated == step else None
        metrics = {} if loss is None or not math.isfinite(loss) else {"val_loss": loss}
        self._rows.count_seconds(self.progress)
        with self._rows.meter.paused() as pause:
            self._recorder.flush()  # what it holds outlives a kill, as the checkpoint does
            share_places(self.loader, self.meshes)
            self.progress.skipped_since_row = self._numerics.since_row
            with self.evaluation_point():
                self._checkpoints.save(step, wait, metrics)
            if wait:
                self._announce(self._checkpoints.settle())
        if (
            step < self.total_steps and self._decision.stop is None
        ):  # of the last one `save` says it
            seconds = settling.seconds + pause.seconds
            self._record("pause", cause="save", step=step, seconds=seconds)

    def _announce(self, steps: Sequence[int]) -> None:
        """Call the hooks of a save for steps that all ranks know to be committed."""
        for step in steps:
            self._extensions.call("on_saved", step, self.paths.checkpoint(step))

    def _record_save(self, event: SaveEvent) -> None:
        """Write what became of a save into the journal; called in the thread that writes, too."""
        if event.kind != "written":
            self._heartbeat.background("save" if event.kind == "staged" else "")
        self._recorder.record_save(event, self.config.resilience.save_limit_seconds)

    # ---- rows, events, hooks

    def _metric_rows(self) -> MetricRows:
        own = self._objective
        columns: dict[str, Columns] = {
            "sums": loss_columns(self.config) if own is None else own.columns,
            **self._extensions.columns(),
        }
        return MetricRows(
            self.config,
            self._device,
            self.meshes.world_size,
            self.total_steps,
            lambda tokens: self._course.flops(tokens, self._flops, self.loader.skipped),
            columns,
            self._evaluation.columns,
        )

    def _check_numerics(self) -> None:
        """End the run or go back if too many steps were bad, up to the row that waits, or up to here."""
        verdicts, last_saved = self._rows.verdicts(), self._checkpoints.last_step
        try:
            self._numerics.check(verdicts, self.progress.step, last_saved)
        except NumericsError:
            self._send_row()
            raise

    def _send_row(self) -> None:
        """Read the last logged step's values, which have arrived, and send the row."""
        if self._rows.is_waiting:
            row = self._rows.finish(self._numerics.take_since_row())
            self._recorder.write(row)
            self._extensions.call("on_row", row)

    @property
    def _prints(self) -> bool:
        return self.meshes.rank == 0 and self.config.metrics.console != "off"

    def _report(self, line: str) -> None:
        """Print a line on rank 0, unless `metrics.console` is off."""
        if self._prints:
            with contextlib.suppress(OSError):  # a terminal that is gone
                print(line, flush=True)

    def _record(self, event: str, **fields: Any) -> None:
        self._recorder.record(event, **fields)

    def _record_data(self, event: str, **fields: Any) -> None:
        """An event of the loader; of another rank than 0, which keeps the journal, a line on stderr."""
        if self._rank:
            print(f"forge-train: rank {self._rank}: {event} {fields}", file=sys.stderr)
        self._record(event, step=self.progress.step, rank=self._rank, **fields)

    def _reshard(self) -> None:
        """A hook of a user may have run the model, which leaves weights gathered, and changed them since."""
        reshard(self.model)


def _changes_rates(changes: Mapping[str, Any]) -> list[str]:
    """The keys among changed ones that give the same step another learning rate."""
    return [key for key in changes if key.startswith(_KEYS_OF_RATES)]
