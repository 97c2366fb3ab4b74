"""The training loop. `fit` is the life of a run, `train_step` the life of a batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forge_ckpt import RNGState, Store
from forge_core import (
    build_optimizer,
    build_schedule,
    flops_per_token,
    initialise,
)
from forge_core.flops import peak_flops
from forge_core.optim import groups_of_part, set_lr
from forge_data import Batch, Loader
from forge_moe import recompute_contexts
from forge_parallel import (
    Meshes,
    clip_grads_,
    find_world,
    global_grad_norm,
    make_meshes,
    parallelize,
    reshard,
    select_device,
)
from forge_parallel.compile import recompilations
from forge_parallel.compute import extra_problems
from forge_resilience import Agreement, ExitCode, PendingDecision, Skips, StopSignal, nonfinite
from forge_train.config.resolve import ResolvedJob
from forge_train.config.schema import DenseModelConfig
from forge_train.errors import (
    ConfigError,
    JobError,
    StateError,
    as_config_error,
    together,
)
from forge_train.metrics.meter import Meter, memory_bytes
from forge_train.trainer.asked import model_problems
from forge_train.trainer.build import (
    build_loader,
    build_model,
    refuse_other_model,
    seed_process,
    total_steps,
    validation_stream,
)
from forge_train.trainer.callbacks import Callback, hook_problems, load_callbacks, state_name
from forge_train.trainer.choose import placement, with_layout
from forge_train.trainer.compute import make_compute
from forge_train.trainer.evaluate import evaluate, share_of_rows
from forge_train.trainer.host_copy import HostCopy
from forge_train.trainer.idle import IdleOptimizer, trains_nothing
from forge_train.trainer.layout import layout_problems, micro_batches, remarks
from forge_train.trainer.mixtures import Mixtures, mixture_sizes, spread_experts
from forge_train.trainer.objective import find_objective
from forge_train.trainer.part import PartOfState, by_name, tensor_names
from forge_train.trainer.progress import Progress
from forge_train.trainer.recorder import PendingRow, Recorder
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.stages import Stages, freeze_groups
from forge_train.trainer.store_errors import store_errors
from forge_train.trainer.votes import StepVotes


class NonFiniteError(JobError):
    """More steps than allowed had a loss or gradient norm that is nan or inf."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `val_loss` is in nats per token, None without validation data."""

    exit_code: ExitCode
    step: int
    val_loss: float | None


class Trainer:
    """Trains what a resolved job describes, from wherever its run directory stands.

        job = forge_train.load_job("config.toml")
        result = Trainer(job, callbacks=[MyCallback()]).fit()

    One process, or one rank of many: under a launcher each rank makes its own, and all decisions are
    taken together.

        trainer = Trainer(job)
        with launch(job.config.parallel) as meshes:
            result = trainer.fit(meshes)

    Raises JobError (ConfigError, DataError, StateError) before anything is started where it can.
    Public while it runs: job, config, model, optimizer, loader, progress, total_steps, device, paths,
    meshes, agreement. Callbacks run on every rank; files are written by rank 0.
    """

    def __init__(self, job: ResolvedJob, callbacks: Sequence[Callback] = ()) -> None:
        world = as_config_error(find_world)
        self.job, self._reasons = with_layout(job, world)
        self.config = config = self.job.config
        problems = layout_problems(config, world.world_size, world.local_world_size)
        if problems:
            raise ConfigError(problems)
        self.callbacks = [*callbacks, *load_callbacks(config.callbacks)]
        if problems := hook_problems(self.callbacks):
            raise ConfigError(problems)
        self.paths = RunDirectory(config.run.dir)
        self.device = as_config_error(lambda: select_device(config.parallel.device))
        self.model = build_model(config.model, config.run.seed)
        layout = config.parallel.axes(world.world_size)
        problems = model_problems(self.model, config, layout)
        if problems:
            raise ConfigError(problems)
        if config.sample.max_new_tokens and not hasattr(self.model, "new_cache"):
            raise ConfigError(
                [f"sample.max_new_tokens {config.sample.max_new_tokens} needs a model that generates "
                 f"(new_cache), which {config.model.name} is not; set sample.max_new_tokens = 0"]
            )  # fmt: skip
        self.total_steps = total_steps(config, self.model)
        freeze_groups(self.model, config)
        self.schedule = as_config_error(lambda: build_schedule(config.schedule, self.total_steps))
        self.flops_per_token = flops_per_token(self.model, config.data.seq_len)
        mixed = bool(mixture_sizes(self.model))
        self._placement = placement(config.parallel, world, experts=mixed)
        reader = layout.coordinates(world.rank)["batch"]
        self.division = micro_batches(config, layout)
        self._reasons += remarks(config, layout)
        self.loader = build_loader(config, reader, self.division)
        sample = as_config_error(lambda: self.loader.filler(0))
        problems = extra_problems(self.model, sample, layout, "[data]")
        self.validation = validation = validation_stream(config)
        if validation is not None and not problems:
            sample = as_config_error(lambda: Loader(validation, 1).filler(0))
            problems = extra_problems(self.model, sample, layout, "[data.validation]")
        if problems:
            raise ConfigError(problems)
        self.progress = Progress()
        self.val_loss: float | None = None
        self.agreement = Agreement()
        self._meshes: Meshes | None = None
        self.votes = StepVotes()
        self._skips = Skips()
        self._skipped_since_row = 0
        self._last_evaluated = self._last_saved = -1

    @property
    def meshes(self) -> Meshes:
        """Where this process stands among the ranks."""
        if self._meshes is None:
            self._join(as_config_error(lambda: make_meshes(self.config.parallel, self.device)))
        assert self._meshes is not None
        return self._meshes

    def request_save(self) -> None:
        """Ask, on any rank, for a checkpoint after the next step."""
        self.votes.save_requested = True

    # ---- the life of a run

    def fit(self, meshes: Meshes | None = None, stop: StopSignal | None = None) -> RunResult:
        """Train to the end or to a stop signal; save; say how it ended.

        `meshes` come from `forge_parallel.launch`, by default from the running process group or one
        process. `stop` is a StopSignal that is open already; by default one is opened here. On many
        ranks a JobError is raised by all of them.
        """
        try:
            if meshes is not None:
                self._join(meshes)
            return self._open_and_fit(stop)
        except JobError as error:
            error.shared = True
            raise
        finally:
            self.loader.close()

    def _join(self, meshes: Meshes) -> None:
        if meshes.batch_size != self.loader.world_size:
            raise ConfigError(
                [f"the process group has {meshes.batch_size} ranks that read data and the environment "
                 f"says {self.loader.world_size}; start it with forge_parallel.launch, or set RANK and "
                 "WORLD_SIZE of the group"]
            )  # fmt: skip
        self._meshes = meshes
        self.agreement = Agreement(meshes.host_group)

    def _open_and_fit(self, stop: StopSignal | None) -> RunResult:
        rank = self.meshes.rank
        together(self.agreement, lambda: self.paths.create(rank))
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(self._open_store())
            self.votes.signal = stop or stack.enter_context(StopSignal(announce=rank == 0))
            changes = together(self.agreement, lambda: self._allowed_changes(store))
            return self._fit(store, changes)

    def _open_store(self) -> Store:
        keep_last = self.config.checkpoint.keep_last
        with store_errors(self.paths.checkpoints, ConfigError):
            return Store(self.paths.checkpoints, keep_last, group=self.meshes.host_group)

    def _allowed_changes(self, store: Store) -> dict[str, list[Any]]:
        changes = self.paths.changes(self.job)
        if self.paths.has_checkpoints():  # before the first there is nothing to protect
            self.paths.refuse_other_experiment(changes)
        return changes

    def _fit(self, store: Store, changes: dict[str, list[Any]]) -> RunResult:
        self._materialise()
        load_seconds = self._resume(store)
        self._open_outputs(changes, load_seconds, store)
        try:
            self._call("on_start")
            self.meter = Meter()
            while self.progress.step < self.total_steps and self.votes.decision.stop is None:
                self.train_step()
                self._after_step(store)
            self._finish(store)
        finally:
            self.recorder.close()
        finished = self.progress.step >= self.total_steps
        code = ExitCode.DONE if finished else ExitCode.REQUEUE
        return RunResult(code, self.progress.step, self.val_loss)

    def _materialise(self) -> None:
        config = self.config
        if not isinstance(config.model, DenseModelConfig):
            refuse_other_model(self.model, self.agreement)
        as_config_error(lambda: spread_experts(self.model, config, self.meshes))
        self._mixture_sizes = mixture_sizes(self.model)
        self._names = tensor_names(self.model)
        shows = self.meshes.rank == 0 and config.metrics.console != "off"
        self.model = as_config_error(
            lambda: parallelize(
                self.model,
                config.parallel,
                self.meshes,
                seq_len=config.data.seq_len,
                recompute_contexts=recompute_contexts if self._mixture_sizes else None,
                report=_say if shows else None,
            )
        )
        # an imported model keeps what its builder drew where it offers no table of its own
        as_config_error(
            lambda: initialise(
                self.model,
                config.run.seed,
                strict=isinstance(config.model, DenseModelConfig),
                whole=self._names,
            )
        )
        self.objective = as_config_error(lambda: find_objective(config.train))
        self.compute = as_config_error(
            lambda: make_compute(self.model, config, self.meshes, self.division, self.objective)
        )
        self.optimizer = as_config_error(self._build_optimizer)
        self.stages = Stages(config, self.model, self.optimizer)
        share = self.division.size / config.train.global_batch
        self.mixtures = Mixtures(self.model, self.meshes, share, self._mixture_sizes)
        self._masks = "skip" in inspect.signature(self.optimizer.step).parameters
        # ranks of a tp group hold the same stream and must drop the same of it
        seed_process(config.run.seed, self.meshes.rank // self.meshes.tp.size)

    def _build_optimizer(self) -> Any:
        """Over this rank's part of the model, which may hold none of a group, or nothing to train at all."""
        if self.meshes.pp.size > 1 and trains_nothing(self.model):
            return IdleOptimizer()
        config = self.config.optimizer
        groups = groups_of_part(self.model, config)
        return build_optimizer(self.model, replace(config, groups=groups))

    def _resume(self, store: Store) -> float:
        """Load the newest checkpoint that verifies, or start at step 0; the seconds it took."""
        started = time.perf_counter()
        self.state = {
            "model": self._part(self.model),
            **self._optimizer_state(),
            "loader": self.loader,
            "progress": self.progress,
            "rng": RNGState(alike=self.meshes.tp.size),
        }
        for callback in self.callbacks:
            if hasattr(callback, "state_dict"):
                self.state[state_name(callback, self.state)] = callback
        with store_errors(self.paths.checkpoints, StateError):
            step = store.load(self.state, self._check_saved)
        self._last_saved = -1 if step is None else step
        return time.perf_counter() - started

    def _optimizer_state(self) -> dict[str, Any]:
        if isinstance(self.optimizer, IdleOptimizer):
            return {}
        return {"optimizer": self._part(by_name(self.optimizer, self.model, self._names))}

    def _check_saved(self, step: int, saved: Mapping[str, Any]) -> None:
        """What a checkpoint says in two places must agree: the step, and how far the data is."""
        progress, cursor = saved["progress"], saved["loader"]["cursor"]
        if progress["step"] != step:
            raise ValueError(f"progress.step {progress['step']} is not that of step {step}")
        tokens = cursor * self.config.data.seq_len
        if progress["tokens"] != tokens:
            raise ValueError(
                f"progress.tokens {progress['tokens']} are not the {tokens} of loader.cursor {cursor}"
            )

    def _part(self, owner: Any) -> Any:
        """State of the whole model, or of the part that this rank of a pipeline has."""
        if self.meshes.pp.size == 1:
            return owner
        return PartOfState(owner, self._names - tensor_names(self.model))

    def _open_outputs(
        self, changes: dict[str, list[Any]], load_seconds: float, store: Store
    ) -> None:
        meshes, step = self.meshes, self.progress.step
        hosts = self.agreement.exchange(self.paths.host)
        writes = meshes.rank == 0
        together(self.agreement, lambda: self.paths.record(self.job, hosts) if writes else None)
        self.recorder = Recorder(
            self.paths, self.config.metrics, step, self.total_steps, writes=writes
        )
        for bad, reason in store.set_aside:
            self._record("quarantine", step=bad, reason=reason)
        event = {
            "step": step,
            "total_steps": self.total_steps,
            "device": str(self.device),
            "world_size": meshes.world_size,
            **(
                {"layout": self._placement, "reasons": self._reasons}
                if meshes.world_size > 1
                else {}
            ),
        }
        if writes and self.config.metrics.console != "off":
            for line in [*self._reasons, *self._placement]:
                _say(f"layout: {line}")
        if step:
            self._record("resume", **event, seconds=load_seconds, changed=changes)
        else:
            self._record("start", **event)

    # ---- the life of a batch

    def train_step(self) -> None:
        """One optimizer step on one global batch. No device synchronisation here."""
        with self.meter.waiting():
            batch = self._next_batch()
        self.stages.enter(self.progress.step + 1, self._record)
        lr = self.config.optimizer.lr * self.schedule(self.progress.step + 1)
        share = self._forward_backward(batch)
        grad_norm, sums = global_grad_norm(self.compute.counted, sums=share)
        assert sums is not None
        loss, *others = sums.unbind()  # of the global batch, on every rank
        clip_grads_(self.compute.parameters, grad_norm, self.config.train.max_grad_norm)
        if self.recorder.pending is not None:
            self._check_skips()  # up to the row's step
        set_lr(self.optimizer, lr)
        bad = nonfinite(loss, grad_norm)
        self._update(bad)
        self.mixtures.end_step(self.progress.step, self.total_steps, bad)
        self.optimizer.zero_grad()
        # after the update: hooks may run the model, which leaves weights gathered for the next forward
        self._send_row()
        tokens = self.config.train.global_batch * self.config.data.seq_len  # filler is not data
        self.progress.step += 1
        self.progress.tokens += tokens
        self.meter.count(tokens)
        if self._due(self.config.metrics.every_steps) or self._evaluation_due():
            row = self._row(lr, batch.digest)
            values = HostCopy([loss, grad_norm, self._skips.take()])
            more = [self.mixtures.take()]
            if self.objective is not None:
                more.append(self.objective.columns(others))
            self.recorder.pending = PendingRow(row, values, more)

    def _next_batch(self) -> Batch:
        """This rank's share; filler if it cannot be read, which the vote then tells."""
        try:
            return next(self.loader)
        except Exception as error:
            self.votes.fault = error
            return self.loader.filler(self.division.size)

    def _forward_backward(self, batch: Batch) -> torch.Tensor:
        """This rank's share of the loss of the global batch, and of an objective's other sums: (k,).

        Gradients come out as those of one mean over the step's valid labels. The ranks' votes travel
        between hosts while the first micro-batch goes forward, and are awaited before its loss.
        """
        pending = self.votes.start(self.agreement, batch, self._count(batch))
        return self.compute.gradients(batch, functools.cache(lambda: self._heed(pending)))

    def _count(self, batch: Batch) -> float:
        """What this rank adds to the normaliser: of the ranks that read the same rows one does."""
        if not self.meshes.is_batch_leader:
            return 0.0
        return batch.label_weight if self.objective is None else self.objective.count(batch)

    def _heed(self, pending: PendingDecision) -> float:
        """What the global batch's labels weigh; raises on all ranks when one cannot go on."""
        step = self.progress.step
        return self.votes.heed(pending, self.agreement, step, self._record)

    def _record(self, event: str, **fields: Any) -> None:
        self.recorder.record(event, **fields)

    def _update(self, bad: torch.Tensor) -> None:
        """The optimizer's step, masked on every rank alike where the numbers are not finite."""
        self._skips.add(bad)
        if self._masks:
            self.optimizer.step(skip=bad)
        elif not float(bad):  # an optimizer without a mask costs a host sync
            self.optimizer.step()

    # ---- between steps

    def _after_step(self, store: Store) -> None:
        self._call("on_step_end")
        if self._evaluation_due():
            self._evaluate()
        if self._due(self.config.checkpoint.every_steps) or self.votes.decision.save:
            self._save(store)

    def _finish(self, store: Store) -> None:
        """The last step is evaluated and saved, whatever the intervals; so is a stop's."""
        finished = self.progress.step >= self.total_steps
        if finished:
            self._evaluate()
        self._save(store)
        if finished:
            self._record("done", step=self.progress.step)
        elif self.votes.decision.stop is not None:
            rank, number = self.votes.decision.stop
            name = StopSignal.name_of(number)
            self._record("stop", step=self.progress.step, signal=name, rank=rank)
        self._call("on_end")

    def _evaluation_due(self) -> bool:
        """At the interval and at the last step; such a step has a row in any case."""
        last = self.progress.step == self.total_steps
        return last or (self.validation is not None and self._due(self.config.eval.every_steps))

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _evaluate(self) -> None:
        if self.validation is None or self._last_evaluated == self.progress.step:
            return
        with self.meter.paused():
            parts = share_of_rows(
                self.validation,
                self.config.eval.sequences,
                self.compute.rows_at_once,
                self.meshes,
                self.agreement,
            )
            self.val_loss = evaluate(self.model, self.compute, self._count, parts, self.agreement)
        self.mixtures.forget()
        self._last_evaluated = self.progress.step
        if self.recorder.pending is not None:
            self.recorder.pending.row["val_loss"] = self.val_loss
        self._record("evaluation", step=self.progress.step, val_loss=self.val_loss)
        self._call("on_evaluation", "validation", self.val_loss)

    def _save(self, store: Store) -> None:
        """Commit this step, on all ranks; not after more bad steps than are allowed."""
        if self._last_saved == self.progress.step:
            return
        self._check_skips()
        self._send_row()
        self.votes.save_requested = False
        with self.meter.paused():
            started = time.perf_counter()
            self.recorder.flush()  # rows up to here outlive a kill, as the checkpoint does
            try:
                with store_errors(self.paths.checkpoints, JobError):
                    store.save(self.progress.step, self.state)
            except JobError as error:  # a full disk: the older checkpoints are still there
                self._record("save_failed", step=self.progress.step, error=str(error))
                raise
            seconds = time.perf_counter() - started
        self._last_saved = self.progress.step
        self._record("save", step=self.progress.step, seconds=round(seconds, 4))
        self._call("on_checkpoint", self.progress.step, self.paths.checkpoint(self.progress.step))

    # ---- metrics

    def _row(self, lr: float, digest: str) -> dict[str, Any]:
        meter, tokens = self.meter, self.progress.tokens
        seconds = meter.seconds
        self.progress.seconds += seconds
        rate = meter.tokens / seconds
        bf16 = self.config.parallel.precision == "bf16"  # the peaks known are those of bf16
        peak = peak_flops(self.device, torch.bfloat16) if bf16 else None
        ranks = self.meshes.world_size
        self.meter = Meter()
        return {
            "step": self.progress.step,
            "loss": None,
            "val_loss": None,
            "grad_norm": None,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_second": rate,
            "flops": self.flops_per_token * tokens,
            "mfu": None if peak is None else rate * self.flops_per_token / (peak * ranks),
            "data_wait_seconds": meter.wait_seconds,
            "memory_bytes": memory_bytes(self.device),
            "seconds": self.progress.seconds,
            "seconds_left": seconds / meter.steps * (self.total_steps - self.progress.step),
            "instances": digest,
            "skipped_steps": 0,
            **(
                {"recompiled": recompilations()["recompiled"]}
                if self.config.parallel.compile
                else {}
            ),
        }

    def _send_row(self) -> None:
        """Read the last logged step's values, which have arrived, and send the row."""
        pending = self.recorder.pending
        if pending is None:
            return
        pending.row["skipped_steps"], self._skipped_since_row = self._skipped_since_row, 0
        self._call("on_log", self.recorder.take())

    def _check_skips(self) -> None:
        """Say what was skipped up to the row that waits, or up to here; fail when it was too much."""
        waits = self.recorder.pending
        counts = self._skips.read() if waits is None else waits.values.read()[2:]
        skipped, longest = map(int, counts)
        if not skipped:
            return
        self._skipped_since_row += skipped
        step, limit = self.progress.step, self.config.train.max_skipped_steps
        self._record("skip", step=step, skipped=skipped, in_a_row=longest)
        if longest <= limit:
            return
        self._send_row()
        raise NonFiniteError(
            [f"by step {step}: the loss or the gradient norm of {longest} steps in a row must be finite "
             f"in at least one of {limit + 1} (train.max_skipped_steps {limit}); they changed no weight, "
             f"and the checkpoints up to step {max(self._last_saved, 0)} are intact: lower optimizer.lr "
             "or train.max_grad_norm and run again"]
        )  # fmt: skip

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            if hook != "on_step_end" or self._due(callback.every_steps):
                getattr(callback, hook)(self, *args)
        if self.callbacks:  # one may have run the model and changed its weights since
            reshard(self.model)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(line, flush=True)
