"""Checkpoints of a run: their content, the resume, and the save of a step."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, RNGState, Store, StoreInUse
from forge_ckpt.stage_state import InDtypes, NamedState, OptionalObject, StageState, tensor_names
from forge_core.optim import IdleOptimizer
from forge_data import InvalidData, Loader
from forge_parallel import Meshes
from forge_resilience import read_events
from forge_train._shared.problems import Problem, invalid
from forge_train._shared.toml_files import read_toml
from forge_train.build.run_directory import RunDirectory
from forge_train.config.init import NAME as MODEL_OF_IMPORT
from forge_train.config.schema import CheckpointConfig, JobConfig
from forge_train.errors import ConfigError, DataError, JobError, StateError, problems_at
from forge_train.run.callback import Callback, state_keys
from forge_train.run.extension import Extension
from forge_train.run.run import Run

Check = Callable[[int, Mapping[str, Any]], None]
#: An object of a checkpoint that an import wrote: it has weights, and nothing else of a run's state.
IMPORTED = "imported"
#: Errors of a disk that is full.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def store_errors(
    checkpoints: Path, unusable: type[JobError], corrupt: type[JobError] = StateError
) -> Iterator[None]:
    """Turn an exception of forge_ckpt into a JobError of one line; `unusable` if disk or values are the cause, but for a
    disk that is full."""
    try:
        yield
    except StoreInUse as error:
        folder, rule = str(checkpoints.parent), f"is in use: {error}"
        raise invalid("run.dir", "in_use", folder, rule, kind=ConfigError) from error
    except CheckpointMismatch as error:
        fix = "choose another run.dir, if they are of another job"
        raise ConfigError([*problems_at(error, checkpoints), fix]) from error
    except CorruptCheckpoint as error:
        raise corrupt(problems_at(error, "")) from error
    except InvalidData as error:  # the checkpoint's data is not the run's
        raise DataError(problems_at(error, checkpoints)) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({error.filename})"
        kind = JobError if error.errno in _FULL else unusable
        raise kind([f"{checkpoints}: {error.strerror or error}{file}"]) from error
    except ValueError as error:
        kind = JobError if getattr(error.__cause__, "errno", None) in _FULL else unusable
        raise kind(problems_at(error, checkpoints)) from error


def checkpoint_state(run: Run, extensions: Iterable[Extension], names: set[str]) -> dict[str, Any]:
    """The objects of a checkpoint, by name; `names` are the tensors of the whole model, of which this rank has some."""
    others = names - tensor_names(run.model)

    def own(state: Any) -> Any:
        return state if run.meshes.pp.size == 1 else StageState(state, others)

    state = {
        "model": own(run.model),
        "optimizer": own(NamedState.of(run.optimizer, run.model, names)),
        "loader": run.loader,
        "progress": run.progress,
        "rng": RNGState(alike=run.meshes.tp.size),
    }
    if isinstance(run.optimizer, IdleOptimizer):
        del state["optimizer"]
    for key, extension in state_keys(extensions).items():
        state[key] = extension if isinstance(extension, Callback) else OptionalObject(extension)
    return state


def share_places(loader: Loader, meshes: Meshes) -> None:
    """Make the loader's state that of all ranks, before a save; one all-reduce if its stream is read in shards."""

    def maximum(table: Any) -> Any:
        dist.all_reduce(torch.from_numpy(table), dist.ReduceOp.MAX, group=meshes.host_group)
        return table

    if meshes.host_group is not None:
        loader.share_places(maximum)


def base_problems(config: JobConfig, run: RunDirectory) -> list[Problem]:
    """Why a run that goes on cannot have adapters: its checkpoints were written without, by an import, say.

    Raises StateError where it had them, and the frozen weights are gone.
    """
    if not config.lora.rank or not run.has_checkpoints():
        return []
    if any(run.base.glob("step-*/manifest.json")):
        return []
    with contextlib.suppress(ValueError, LookupError, TypeError):  # as far as config.toml tells
        if read_toml(run.config)["lora"]["rank"]:
            rule = "must hold the frozen weights of the run, and they are gone"
            raise invalid("base", "missing", str(run.base), rule, "restore it", kind=StateError)
    rule = f"needs {run.base}, the frozen weights, and {run.path} has checkpoints without"
    other = f"choose another run.dir and set init.from = '{run.path}'"
    fix = f"to train adapters of this run {other}, or restore the folder"
    return [Problem("lora.rank", "base", config.lora.rank, rule, fix)]


class Checkpoints:
    """Loads and saves the state of a run. Collective, but for `listen`: every rank calls every method.

    last_step: the step of the newest checkpoint that was loaded or saved, or is being saved, -1 without one.
    committed: the newest step that this rank knows to be committed. wants_retry: whether a failed save must be
    made good now; the first in a row in the next step, those after it when the next save is due. `tokens(cursor, windows)`
    says how many a run has seen at a cursor. `after_load(step)` is called with the state of a step, -1: the initial one.

    A save in the background that the disk refuses: `listen` learns of it and sets `wants_retry`, the vote of the next step
    tells the other ranks, and all save after that step. `settle` raises JobError after `max_failed_saves` in a row. A save
    that is waited for (`checkpoint.wait`, and the last one) raises at once.
    """

    def __init__(
        self,
        store: Store,
        config: CheckpointConfig,
        state: dict[str, Any],
        tokens: Callable[[int, Sequence[Sequence[int]]], int],
        after_load: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.last_step = -1
        self.committed = -1
        self._in_flight: int | None = None  # a save whose end not all ranks know
        self._failures = 0
        self.wants_retry = False
        self._store, self._config = store, config
        self._state, self._tokens, self._after_load = state, tokens, after_load

    def load(self, begin: Callable[[dict[str, Any], Check], None] | None = None) -> float:
        """Load the newest checkpoint that verifies, or keep the state as built; the seconds it took.

        Without one, `begin(state, check)` fills the state of a fork. An import that nothing has trained yet gives the
        weights; all else stays as built. StateError if there was one; ConfigError if a save without waiting would not fit `checkpoint.staging_gib`.
        """
        started = time.perf_counter()
        with store_errors(self._store.path, StateError):
            if self._store.steps() == [0] and self._imported():
                step = self._store.load({"model": InDtypes.fp32(self._state["model"])})
            else:
                step = self._store.load(self._state, self._check_saved)
        if step is None:
            self._raise_if_lost()
        if step is None and begin is not None:
            begin(self._state, self._check_saved)
        elif step is None and (self._store.path.parent / MODEL_OF_IMPORT).exists():
            rule = f"holds no checkpoint, and {MODEL_OF_IMPORT} next to it is of imported weights"
            fix = "import them again, or remove that file to begin from fresh ones"
            raise invalid("", "not_found", str(self._store.path), rule, fix, kind=StateError)

        self._after_load(-1 if step is None else step)
        seconds = time.perf_counter() - started
        self.last_step = self.committed = -1 if step is None else step
        if self._config.every_steps and not self._config.wait:
            with store_errors(self._store.path, ConfigError):
                self._store.prepare(self._state)
        return seconds

    def _raise_if_lost(self) -> None:
        """Raise StateError if the journal has a save: a run that begins again would remove its metrics."""
        run = RunDirectory(self._store.path.parent)
        saved = [e.get("step") for e in read_events(run.events) if e.get("event") == "save"]
        if saved:
            rule = f"holds no checkpoint, and {run.events.name} next to it records a save of step {saved[-1]}"
            fix = f"restore them; to begin anew choose another run.dir, or remove {run.events.name}, too"
            raise invalid("", "lost", str(self._store.path), rule, fix, kind=StateError)

    def go_back(self, latest: int, wanted: int) -> float | None:
        """Load the newest checkpoint up to step `wanted`, or else the oldest up to `latest`, and remove those behind
        it; the seconds it took. None if there is no such checkpoint; an import is none. After `settle`."""
        started = time.perf_counter()
        with store_errors(self._store.path, StateError):
            steps = [step for step in self._store.steps() if step <= latest]
            if steps[:1] == [0] and self._imported():
                del steps[0]
            if not steps:
                return None
            target = max((step for step in steps if step <= wanted), default=steps[0])
            # first the load, then the removal: a damaged target must leave what is behind it
            step = self._store.load(self._state, self._check_saved, newest=target)
            assert step is not None  # else CorruptCheckpoint
            self._store.discard_after(step)
            self._after_load(step)
        self.last_step = self.committed = step
        return time.perf_counter() - started

    def settle(self) -> list[int]:
        """Wait for the save in flight; [its step] if it is committed and no rank was told before.

        JobError for the `max_failed_saves`-th in a row that the disk refused; fewer are left to the next save.
        """
        failure: JobError | None = None
        try:
            with store_errors(self._store.path, JobError, JobError):  # older ones are sound
                self._store.wait()
        except JobError as error:
            failure = error
        self.listen()
        many = self._failures >= self._config.max_failed_saves
        if failure is not None and (many or not isinstance(failure.__cause__, OSError)):
            raise failure
        return self.announce(self.committed)

    def save(self, step: int, wait: bool, metrics: Mapping[str, float]) -> None:
        """Save the state of `step`, after `settle`; without `wait` it may change when this returns.

        JobError where the disk refuses a save that is waited for, or too many others: older checkpoints are intact.
        """
        self.wants_retry = False
        self.last_step = self._in_flight = step
        with store_errors(self._store.path, JobError, JobError):  # older ones are sound
            self._store.save(step, self._state, wait, metrics)

    def listen(self) -> None:
        """Learn what became of saves, on this rank."""
        for event in self._store.poll():
            if event.kind == "committed":
                self.committed, self._failures = event.step, 0
            elif event.kind == "failed":
                self._failures = event.failures
                self.wants_retry = self._failures == 1
                self.last_step = self.committed

    def announce(self, committed: int) -> list[int]:
        """[the step in flight], once, if it is the one that all ranks now know to be `committed`."""
        if self._in_flight is None or self._in_flight != committed:
            return []
        self._in_flight = None
        return [committed]

    def _imported(self) -> bool:
        """Whether an import wrote step 0."""
        return IMPORTED in self._store.inspect(0)["objects"]

    @property
    def damaged(self) -> list[tuple[int, str]]:
        """(step, reason) of the checkpoints that `load` found damaged."""
        return list(self._store.set_aside)

    def _check_saved(self, step: int, saved: Mapping[str, Any]) -> None:
        """Numbers that a checkpoint holds twice must agree: the step, and the position in the data."""
        progress, cursor = saved["progress"], saved["loader"]["cursor"]
        if progress["step"] != step:
            rule = f"must be {step}, the step of the checkpoint"
            raise invalid("progress.step", "mismatch", progress["step"], rule)
        tokens = self._tokens(cursor, saved["loader"].get("skipped", ()))
        if progress["tokens"] == tokens:
            return
        # not damage, so nothing may be set aside for it
        if saved["loader"]["fingerprint"] != self._state["loader"].stream.fingerprint():
            rule = (
                f"must keep the sequences of phases that have begun: the run has seen {progress['tokens']:,} tokens in "
                f"{cursor:,} sequences, which are {tokens:,} in these phases"
            )
            fix = "restore them, or begin a run with init.from"
            raise invalid("data.phases", "changed", ..., rule, fix, kind=StateError)
        rule = f"must be {tokens}, those of loader.cursor {cursor}"
        raise invalid("progress.tokens", "mismatch", progress["tokens"], rule)
