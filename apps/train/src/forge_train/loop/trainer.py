"""The training loop. `fit` is the life of a run, `train_step` the life of a batch."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_ckpt.stage_state import tensor_names
from forge_core.optim import set_lr
from forge_data import Batch, Loader
from forge_parallel import Meshes, clip_grads_, global_grad_norm, make_meshes
from forge_resilience import Agreement, ExitCode, StopSignal, Vote
from forge_resilience.alerts import follow
from forge_resilience.progress import Progress
from forge_train._shared.problems import invalid
from forge_train.build.resolve import ResolvedJob
from forge_train.build.run_directory import RunDirectory
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, JobError, config_errors, run_on_all_ranks
from forge_train.loop.assemble import assemble, seed_rank
from forge_train.loop.evaluator import Evaluator
from forge_train.loop.guard import Guard, RollbackRequested, raise_without_saves
from forge_train.loop.opening import open_run
from forge_train.loop.start import open_store, report_start, restore
from forge_train.loop.vote import PendingVotes, fault_code
from forge_train.run.callback import Callback
from forge_train.run.checkpoints import Checkpoints, checkpoint_state, share_places
from forge_train.run.extension import Extension

#: Attributes that are those of `run` since 0.2.0.
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
    Public: `run`, the state of the run, and job, config, model, optimizer, loader, progress, total_steps, paths and meshes,
    which are attributes of it. agreement, device and heartbeat are read at `run`; 0.3.0 removes them here.
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
        opened = open_run(job, [*extensions, *callbacks], until)
        self.run, self._extensions, self._initial, self._notes = opened
        for extension in self._extensions:
            if isinstance(extension, Callback):
                extension.trainer = self
        self._until, self._saves = until, saves
        self._guard, self._evaluator = Guard(self.run), Evaluator(self.run, evaluates)
        self._stop = StopSignal()
        self._save_requested = False
        self._copies: torch.cuda.Stream | None = None
        self._masks_update = False
        self._checkpoints: Checkpoints

    # ---- what the run has, by the names of 0.1

    @property
    def job(self) -> ResolvedJob:
        """The resolved job."""
        return self.run.job

    @property
    def config(self) -> JobConfig:
        """Its configuration."""
        return self.run.config

    @property
    def paths(self) -> RunDirectory:
        """The run directory."""
        return self.run.folder

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model, after `fit` or `prepare`."""
        return self.run.model

    @property
    def optimizer(self) -> Any:
        """The optimizer, after `fit` or `prepare`."""
        return self.run.optimizer

    @property
    def loader(self) -> Loader:
        """The batches of this rank."""
        return self.run.loader

    @property
    def progress(self) -> Progress:
        """Steps and tokens so far."""
        return self.run.progress

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        return self.run.total_steps

    @property
    def meshes(self) -> Meshes:
        """This rank's place in the meshes of the job. RuntimeError before `fit` or `prepare`."""
        if not hasattr(self.run, "meshes"):
            raise RuntimeError("meshes: there are none before fit or prepare")
        return self.run.meshes

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            if name not in _MOVED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            use = f"Trainer.{name}: use Trainer.run.{name}"
            warnings.warn(use, DeprecationWarning, stacklevel=2)
            return getattr(self.run, name)

    def request_save(self) -> None:
        """Ask, on any rank, for a checkpoint after the next step."""
        self._save_requested = True

    def evaluation_point(self) -> AbstractContextManager[None]:
        """Swap in the weights to evaluate and save (an average, schedule-free); no effect for other optimizers.

            with trainer.evaluation_point():        # between steps, on every rank
                accuracy = my_evaluation(trainer.model)

        Changes of the weights inside are kept, as the new weights to evaluate.
        """
        return self.run.evaluation_point()

    # ---- the life of a run

    def fit(self, meshes: Meshes | None = None, stop: StopSignal | None = None) -> RunResult:
        """Train to the end or to a stop signal, and save.

        `meshes` come from `forge_parallel.launch`, by default from the running process group or one
        process. `stop` is a StopSignal that is open already; by default one is opened here. On many
        ranks a JobError is raised by all of them. The model is left as it is evaluated and saved.
        """
        try:
            self._join(meshes)
            with contextlib.ExitStack() as stack:
                self._open(stack, stop)
                self._train()
        except JobError as error:
            error.shared = True
            raise
        finally:
            self.loader.close()
        step, finished = self.progress.step, self.progress.step >= self.total_steps
        code = ExitCode.DONE if finished else ExitCode.REQUEUE
        return RunResult(code, step, self._evaluator.val_loss)

    def prepare(self, meshes: Meshes | None = None) -> None:
        """Build, shard and initialize the model and what trains it, without training; for tests. Collective.

        `meshes` as for `fit`.
        """
        self._join(meshes)
        self._build()

    def _join(self, meshes: Meshes | None) -> None:
        """Take this rank's place in the meshes, by default of the running process group or one process."""
        run = self.run
        if meshes is None:
            with config_errors():
                meshes = make_meshes(run.config.parallel, run.device)
        if meshes.batch_size != run.loader.world_size:
            rule = f"data ranks must be {run.loader.world_size}, those of the environment"
            fix = "start the process group with forge_parallel.launch, or set RANK and WORLD_SIZE of it"
            raise invalid("meshes", "mismatch", meshes.batch_size, rule, fix, kind=ConfigError)
        run.meshes, run.agreement = meshes, Agreement(meshes.host_group)

    def _build(self) -> set[str]:
        """Shard and initialize the model, and build what trains it; the names of all tensors of the model. Collective."""
        run = self.run
        names = tensor_names(run.model)
        assemble(run)
        self._masks_update = "skip" in inspect.signature(run.optimizer.step).parameters
        if run.device.type == "cuda":  # copies overlap with the step before
            self._copies = torch.cuda.Stream(run.device)
        seed_rank(run.config.run.seed, run.meshes)
        return names

    def _open(self, stack: contextlib.ExitStack, stop: StopSignal | None) -> None:
        """Open the files of the run, which `stack` closes, and load its state. ConfigError for another experiment's folder."""
        run = self.run
        run_on_all_ranks(run.agreement, lambda: run.folder.create(run.meshes.rank))
        alerts = run.config.resilience.alerts
        stack.enter_context(follow(run.folder.events, alerts, run.meshes.rank))
        # before the store, which waits for a save at the end: a signal must not end that
        self._stop = stop or stack.enter_context(StopSignal(announce=run.meshes.rank == 0))
        store = stack.enter_context(open_store(run))
        changed = run_on_all_ranks(run.agreement, lambda: run.folder.allowed_changes(run.job))

        names = self._build()
        stack.enter_context(self._extensions.around("around_run", run))
        with run.evaluation_point():  # which names of an optimizer's state belong to
            state = checkpoint_state(run, self._extensions, names)
        self._checkpoints = Checkpoints(run, store, state)
        life = restore(run, self._checkpoints, self._initial, changed)
        stack.callback(run.recorder.close)
        report_start(run, life, self._initial, self._notes, self._checkpoints.damaged)
        self._extensions.call("start", run)
        run.count_steps()  # a callback may leave out data
        run.open_rows()

    def _train(self) -> None:
        """Train until the run is over, with as many rollbacks as the job allows."""
        run = self.run
        if run.config.eval.at_start and run.progress.step == 0:
            self._evaluator()

        while True:
            try:
                if self._guard.policy.can_roll_back and self._checkpoints.last_step < 0:
                    self._save(run.config.checkpoint.wait)  # the initial state, to go back to
                while self._goes_on():
                    with self._extensions.around("around_step", run.progress.step + 1):
                        self.train_step()
                        self._between_steps()
                self._finish()
                break

            except RollbackRequested as request:
                if not self._saves:
                    raise_without_saves(request.outcome)
                self._guard.go_back(self._checkpoints, request.outcome)
                self._evaluator.forget()
                self._extensions.call("after_rollback", run.progress.step)
        run.switch("eval")

    def _goes_on(self) -> bool:
        """Whether there is another step to train."""
        last = self.total_steps if self._until is None else min(self._until, self.total_steps)
        return self.progress.step < last and self.run.decision.stop is None

    # ---- the life of a batch

    def train_step(self) -> None:
        """One optimizer step on one global batch. No device synchronization here."""
        run, extensions = self.run, self._extensions
        step = run.progress.step + 1  # steps are counted from 1
        extensions.call("before_batch", step)

        start = run.loader.cursor
        run.enter_segment(step)
        with run.phase("data", step):
            batch, fault = run.loader.next_or_filler(self._stage)
        tokens = (run.loader.cursor - start) * run.segment.seq_len  # padding sequences are no data
        lr = run.learning_rate(step, run.progress.tokens + tokens, run.segment)

        extensions.call("before_forward", step, batch)
        self._checkpoints.listen()
        with run.phase("forward_backward"):
            with extensions.around("around_backward", step):
                share = self._forward_backward(batch, fault)
            extensions.call("after_backward", step, batch)

        # one all-reduce gives the norm and the loss of the global batch, on each rank
        with run.phase("grad_norm"):
            grad_norm, sums = global_grad_norm(run.compute.counted, sums=share)
            assert sums is not None
            clip_grads_(run.compute.parameters, grad_norm, run.config.train.max_grad_norm)

        # The numbers of the row of the step before are on the host now, and hooks must see the weights of their row. This may
        # raise (rollback, NumericsError): this step is then left before its update, though its batch was read.
        if run.rows.is_waiting:
            self._guard.check(self._checkpoints.last_step)
            run.send_row()

        # `bad` stays on the device: the update is masked, so the host does not wait
        labeled = run.decision.count > 0
        bad = self._guard.policy.judge(sums[0], grad_norm, labeled=labeled)
        set_lr(run.optimizer, lr)
        with run.phase("optimizer"):
            self._update(bad)
        extensions.call("after_update", step, bad)
        run.optimizer.zero_grad()

        run.progress.step += 1
        run.progress.tokens += tokens
        run.rows.meter.count(tokens)
        if self._row_due():
            self._begin_row(step, lr, batch, grad_norm, sums if labeled else sums * math.nan)

    def _stage(self, batch: Batch) -> Batch:
        """The batch on the device of this rank, copied while the step before is computed."""
        if self._copies is None:
            return batch
        return batch.staged(self._copies, self.run.compute.host_names(batch))

    def _forward_backward(self, batch: Batch, fault: Exception | None = None) -> Tensor:
        """This rank's part of the loss of the global batch, and of an objective's other sums: (k,).

        Gradients come out as those of one mean over the step's valid labels. The ranks' votes travel
        between hosts while the first micro-batch goes forward, and are awaited before its loss.
        """
        run = self.run
        # taken here, so that a request of a hook outlives a save that is due at the same step
        requested, self._save_requested = self._save_requested, False
        vote = Vote(
            stop=self._stop.number,
            save=requested or self._checkpoints.wants_retry,
            saved=self._checkpoints.committed,
            fault=int(fault_code(fault)),
            digest=batch.digest,
            count=run.label_weight(batch),
            counts=self._extensions.token_counts(batch),
        )
        pending = PendingVotes(run, vote, fault, self._extensions.set_token_counts)
        share = run.compute.gradients(batch, pending.wait)
        run.decision = pending.decision
        return share

    def _update(self, bad: Tensor) -> None:
        """The optimizer's step, masked on every rank alike where the numbers are bad."""
        if self._masks_update:
            self.optimizer.step(skip=bad)
        elif not float(bad):  # an optimizer without a mask costs a host sync
            self.optimizer.step()

    # ---- between steps

    def _between_steps(self) -> None:
        run = self.run
        run.announce(self._checkpoints.announce(run.decision.saved))
        self._extensions.call("after_step", run.progress.step)
        if self._evaluator.is_due():
            self._evaluator()
        if self._due(run.config.checkpoint.every_steps) or run.decision.save:
            self._save(run.config.checkpoint.wait)

    def _row_due(self) -> bool:
        """Whether the step that was just done has a row."""
        due = self._due(self.config.metrics.every_steps) or self._evaluator.is_due()
        return due or self._extensions.wants_row(self.progress.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _begin_row(
        self, step: int, lr: float, batch: Batch, grad_norm: Tensor, sums: Tensor
    ) -> None:
        """Begin the row of a step; a step without labels has no loss, which is not a loss of 0."""
        numbers = {
            "loss": sums[0],
            "grad_norm": grad_norm,
            "verdicts": self._guard.policy.take(),
            "sums": sums[1:],
            **self._extensions.numbers(step),
        }
        self.run.rows.begin(self.progress, lr, batch.digest, numbers)

    def _save(self, wait: bool) -> None:
        """Save this step, on all ranks; not after more bad steps than are allowed. A save before is committed first."""
        if not self._saves:
            return
        run, step = self.run, self.run.progress.step
        run.rows.count_seconds(run.progress)

        with run.phase("save") as pause:
            run.announce(self._checkpoints.settle())
            if self._checkpoints.last_step == step:
                return

            # rows and verdicts up to this step belong to the checkpoint
            self._guard.check(self._checkpoints.last_step)
            run.send_row()
            self._extensions.call("before_save", step)

            loss = self._evaluator.loss_at(step)
            run.recorder.flush()  # what it holds outlives a kill, as the checkpoint does
            share_places(run.loader, run.meshes)
            with run.evaluation_point():
                metrics = {} if loss is None or not math.isfinite(loss) else {"val_loss": loss}
                self._checkpoints.save(step, wait, metrics)
            if wait:
                run.announce(self._checkpoints.settle())

        if step < run.total_steps and run.decision.stop is None:  # `save` says it of the last one
            run.record("pause", cause="save", step=step, seconds=pause.seconds)

    def _finish(self) -> None:
        """Evaluate and save the last step, whatever the intervals; save that of a stop."""
        run, step = self.run, self.run.progress.step
        finished = step >= run.total_steps
        if finished:
            self._evaluator()
        self._save(wait=True)
        run.send_row()  # of a run that saves nothing
        run.heartbeat.enter("exit")
        if finished:
            run.record("done", step=step)
        elif run.decision.stop is not None:
            rank, number = run.decision.stop
            run.record("stop", step=step, signal=StopSignal.name_of(number), rank=rank)
        self._extensions.call("finish")
