"""The training loop. `fit` is the life of a run, `train_step` the life of a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, RNGState, Store, StoreInUse
from forge_core import (
    build_optimizer,
    build_schedule,
    cross_entropy,
    flops_per_token,
    initialise,
)
from forge_core.flops import peak_flops
from forge_core.optim.build import OPTIMIZERS
from forge_core.optim.registry import find
from forge_data import Batch
from forge_parallel import clip_grad_norm_, parallelize, select_device
from forge_resilience import ExitCode, Journal, StopSignal
from forge_train.config.resolve import ResolvedJob
from forge_train.config.schema import DenseModelConfig
from forge_train.errors import ConfigError, DataError, JobError, StateError
from forge_train.metrics.console import ConsoleSink, console_mode
from forge_train.metrics.meter import Meter, memory_bytes
from forge_train.metrics.sinks import BackgroundSink, JsonlSink, TensorBoardSink
from forge_train.trainer.build import build_loader, build_model, total_steps, validation_stream
from forge_train.trainer.callbacks import Callback, load_callbacks
from forge_train.trainer.evaluate import evaluate
from forge_train.trainer.progress import Progress
from forge_train.trainer.run_directory import RunDirectory


class NonFiniteError(JobError):
    """The loss or the gradient norm is nan or inf; nothing is saved after it."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `val_loss` is in nats per token, None without validation data."""

    exit_code: ExitCode
    step: int
    val_loss: float | None


@dataclass
class _PendingRow:
    """A logged step whose device values have not been read yet."""

    row: dict[str, Any]
    loss: torch.Tensor
    grad_norm: torch.Tensor


class Trainer:
    """Trains what a resolved job describes, from wherever its run directory stands.

        job = forge_train.load_job("config.toml")
        result = Trainer(job, callbacks=[MyCallback()]).fit()

    Raises JobError (ConfigError, DataError, StateError) before anything is started where it can.
    Public while it runs: job, config, model, optimizer, loader, progress, total_steps, device, paths.
    """

    def __init__(self, job: ResolvedJob, callbacks: Sequence[Callback] = ()) -> None:
        self.job = job
        self.config = config = job.config
        self.callbacks = [*callbacks, *load_callbacks(config.train.callbacks)]
        self.paths = RunDirectory(config.run.dir)
        self.device = _as_config_error(lambda: select_device(config.parallel.device))
        self.model = build_model(config.model, config.run.seed)
        if config.sample.max_new_tokens and not hasattr(self.model, "new_cache"):
            raise ConfigError(
                [f"sample.max_new_tokens {config.sample.max_new_tokens} needs a model that generates "
                 f"(new_cache), which {config.model.name} is not; set sample.max_new_tokens = 0"]
            )  # fmt: skip
        self.total_steps = total_steps(config, self.model)
        self.schedule = _as_config_error(lambda: build_schedule(config.schedule, self.total_steps))
        _as_config_error(lambda: find(config.optimizer.name, OPTIMIZERS, "forge.optimizers"))
        self.flops_per_token = flops_per_token(self.model, config.data.seq_len)
        self.loader = build_loader(config)
        self.validation = validation_stream(config)
        self.progress = Progress()
        self.val_loss: float | None = None
        self._pending: _PendingRow | None = None
        self._latest: tuple[torch.Tensor, ...] = ()
        self._last_evaluated = self._last_saved = -1

    # ---- the life of a run

    def fit(self) -> RunResult:
        """Train to the end or to a stop signal; save; say how it ended."""
        self.paths.create()
        try:
            keep_last = self.config.checkpoint.keep_last
            with Store(self.paths.checkpoints, keep_last) as store, StopSignal() as stop:
                changes = self.paths.changes(self.job)
                if store.steps():  # before the first checkpoint there is nothing to protect
                    self.paths.refuse_other_experiment(changes)
                return self._fit(store, stop, changes)
        except StoreInUse as error:
            raise ConfigError([f"run.dir {self.paths.path} is in use: {error}"]) from error
        finally:
            self.loader.close()

    def _fit(self, store: Store, stop: StopSignal, changes: dict[str, list[Any]]) -> RunResult:
        self._materialise()
        self._resume(store)
        self._open_outputs(changes)
        self._call("on_start")
        try:
            self.meter = Meter()
            while self.progress.step < self.total_steps and not stop.requested:
                self.train_step()
                self._after_step(store)
            self._finish(store, stop)
        finally:
            for sink in self.sinks:
                sink.close()
        finished = self.progress.step >= self.total_steps
        code = ExitCode.DONE if finished else ExitCode.REQUEUE
        return RunResult(code, self.progress.step, self.val_loss)

    def _materialise(self) -> None:
        config = self.config
        self.model = parallelize(self.model, config.parallel, self.device)
        # an imported model keeps what its builder drew where it offers no table of its own
        _as_config_error(
            lambda: initialise(
                self.model, config.run.seed, strict=isinstance(config.model, DenseModelConfig)
            )
        )
        self.optimizer = _as_config_error(lambda: build_optimizer(self.model, config.optimizer))
        torch.manual_seed(config.run.seed)

    def _resume(self, store: Store) -> None:
        """Load the newest checkpoint that verifies, or start at step 0."""
        started = time.perf_counter()
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
            "progress": self.progress,
            "rng": RNGState(),
        }
        for callback in self.callbacks:
            if hasattr(callback, "state_dict"):
                self.state[_state_name(callback, self.state)] = callback
        try:
            step = store.load(self.state)
        except CheckpointMismatch as error:
            fix = (
                "the checkpoints of this run.dir belong to another model or to other callbacks with "
                "state; choose another run.dir"
            )
            raise ConfigError([f"{self.paths.checkpoints}: {error}", fix]) from error
        except CorruptCheckpoint as error:
            raise StateError([str(error)]) from error
        except ValueError as error:  # the loader's fingerprint
            raise DataError([f"{self.paths.checkpoints}: {error}"]) from error
        self._last_saved = -1 if step is None else step
        self._load_seconds = time.perf_counter() - started

    def _open_outputs(self, changes: dict[str, list[Any]]) -> None:
        step = self.progress.step
        try:
            self.paths.record(self.job)
        except OSError as error:
            raise JobError(
                [f"run.dir {self.paths.path} cannot be written ({error.strerror}); make room there or "
                 "choose another folder"]
            ) from error  # fmt: skip
        self.journal = Journal(self.paths.events)
        event = {"step": step, "total_steps": self.total_steps, "device": str(self.device)}
        if step:
            self.journal.record("resume", **event, seconds=self._load_seconds, changed=changes)
        else:
            self.journal.record("start", **event)
        paths, metrics = self.paths, self.config.metrics
        self.sinks = [BackgroundSink(lambda: JsonlSink(paths.metrics, step), "metrics.jsonl")]
        mode = console_mode(metrics.console)
        if mode is not None:
            self.sinks.append(
                BackgroundSink(lambda: ConsoleSink(mode, step, self.total_steps), "console")
            )
        if metrics.tensorboard:
            self.sinks.append(
                BackgroundSink(lambda: TensorBoardSink(paths.tensorboard, step), "tensorboard")
            )

    # ---- the life of a batch

    def train_step(self) -> None:
        """One optimizer step on one global batch. No device synchronisation here."""
        with self.meter.waiting():
            batch = next(self.loader)
        lr = self.config.optimizer.lr * self.schedule(self.progress.step + 1)
        loss = self._forward_backward(batch)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.config.train.max_grad_norm)
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._read_pending()
        self._latest = (loss, grad_norm)
        tokens = batch.tokens.numel()
        self.progress.step += 1
        self.progress.tokens += tokens
        self.meter.count(tokens)
        if self._due(self.config.metrics.every_steps) or self._evaluation_due():
            self._pending = _PendingRow(self._row(lr, batch.digest), loss, grad_norm)

    def _forward_backward(self, batch: Batch) -> torch.Tensor:
        """Sum of token losses over the labels of the whole step, micro-batch by micro-batch.

        Gradients come out as those of one mean over the step's valid labels. Returns that mean.
        """
        valid = max(batch.num_valid, 1)
        micro_batch = self.config.train.micro_batch or len(batch.tokens)
        step_loss = torch.zeros((), device=self.device)
        for part in batch.split(micro_batch):
            part = part.to(self.device)
            logits = self.model(
                part.tokens, positions=part.positions, document_ids=part.document_ids
            )
            loss = cross_entropy(logits, part.labels).sum / valid
            loss.backward()
            step_loss += loss.detach()
        return step_loss

    # ---- between steps

    def _after_step(self, store: Store) -> None:
        self._call("on_step_end")
        if self._evaluation_due():
            self._evaluate()
        if self._due(self.config.checkpoint.every_steps):
            self._save(store)

    def _finish(self, store: Store, stop: StopSignal) -> None:
        """The last step is evaluated and saved, whatever the intervals; so is a stop's."""
        finished = self.progress.step >= self.total_steps
        if finished:
            self._evaluate()
        self._save(store)
        if finished:
            self.journal.record("done", step=self.progress.step)
        else:
            self.journal.record("stop", step=self.progress.step, signal=stop.signal_name)
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
        batch_size = self.config.train.micro_batch or self.config.train.global_batch
        with self.meter.paused():
            self.val_loss = evaluate(
                self.model, self.validation, self.config.eval.sequences, batch_size, self.device
            )
        self._last_evaluated = self.progress.step
        if self._pending is not None:
            self._pending.row["val_loss"] = self.val_loss
        self.journal.record("evaluation", step=self.progress.step, val_loss=self.val_loss)
        self._call("on_evaluation", self.val_loss)

    def _save(self, store: Store) -> None:
        """Commit this step; a step whose numbers are not finite is never saved."""
        if self._last_saved == self.progress.step:
            return
        self._read_pending()
        self._refuse_nonfinite(*map(float, self._latest))
        with self.meter.paused():
            started = time.perf_counter()
            for sink in self.sinks:
                sink.flush()  # rows up to here outlive a kill, as the checkpoint does
            try:
                store.save(self.progress.step, self.state)
            except OSError as error:  # a full disk: the older checkpoints are still there
                self.journal.record("save_failed", step=self.progress.step, error=str(error))
                raise JobError([f"{self.paths.checkpoints}: {error}"]) from error
            seconds = time.perf_counter() - started
        self._last_saved = self.progress.step
        self.journal.record("save", step=self.progress.step, seconds=round(seconds, 4))
        self._call("on_checkpoint", self.paths.checkpoints)

    # ---- metrics

    def _row(self, lr: float, digest: str) -> dict[str, Any]:
        meter, tokens = self.meter, self.progress.tokens
        seconds = meter.seconds
        self.progress.seconds += seconds
        rate = meter.tokens / seconds
        bf16 = self.config.parallel.precision == "bf16"  # the peaks known are those of bf16
        peak = peak_flops(self.device, torch.bfloat16) if bf16 else None
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
            "mfu": None if peak is None else rate * self.flops_per_token / peak,
            "data_wait_seconds": meter.wait_seconds,
            "memory_bytes": memory_bytes(self.device),
            "seconds": self.progress.seconds,
            "seconds_left": seconds / meter.steps * (self.total_steps - self.progress.step),
            "instances": digest,
        }

    def _read_pending(self) -> None:
        """Read the last logged step's values (the only host read of the loop) and send the row."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        row = pending.row
        row["loss"], row["grad_norm"] = float(pending.loss), float(pending.grad_norm)
        for sink in self.sinks:
            sink.write(row)
        self._call("on_log", row)
        self._refuse_nonfinite(row["loss"], row["grad_norm"])

    def _refuse_nonfinite(self, *values: float) -> None:
        if all(map(math.isfinite, values)):
            return
        loss, grad_norm = values
        self.journal.record("nonfinite", step=self.progress.step, loss=str(loss))
        raise NonFiniteError(
            [f"by step {self.progress.step}: loss {loss} and grad_norm {grad_norm} must be finite; "
             f"the checkpoints up to step {max(self._last_saved, 0)} are intact: lower optimizer.lr "
             "or train.max_grad_norm and run again"]
        )  # fmt: skip

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)


def _state_name(callback: Callback, taken: dict[str, Any]) -> str:
    """Name of a callback's state in checkpoints: its class, numbered when there are several."""
    kind = type(callback)
    name = f"callback.{kind.__module__}.{kind.__qualname__}"
    number = sum(1 for other in taken if other.split("#")[0] == name)
    return f"{name}#{number + 1}" if number else name


def _as_config_error(build: Any) -> Any:
    try:
        return build()
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from error
