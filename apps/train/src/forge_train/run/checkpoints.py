"""Checkpoints of a run: their content, the resume, and the save of a step."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, RNGState, Store, StoreInUse
from forge_ckpt.stage_state import InDtypes, NamedState, OptionalObject, StageState, tensor_names
from forge_ckpt.training import TrainingCheckpoints
from forge_core.optim import IdleOptimizer
from forge_data import InvalidData, Loader
from forge_parallel import Meshes
from forge_resilience import read_events
from forge_train._shared.problems import Problem, invalid
from forge_train._shared.toml_files import read_toml
from forge_train.build.run_directory import RunDirectory
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, DataError, JobError, StateError, problems_at
from forge_train.run.callback import Callback, state_keys
from forge_train.run.extension import Extensions
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
    """Turn an exception of forge_ckpt into a JobError of one line.

    `unusable` is the kind for I/O errors and invalid values, except for a full disk, which is a JobError.
    """
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


def checkpoint_state(run: Run, extensions: Extensions, names: set[str]) -> dict[str, Any]:
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
    return extensions.checkpoint_objects(state)


def share_places(loader: Loader, meshes: Meshes) -> None:
    """Make the loader's state that of all ranks, before a save; one all-reduce if its stream is read in shards."""

    def maximum(table: Any) -> Any:
        dist.all_reduce(torch.from_numpy(table), dist.ReduceOp.MAX, group=meshes.host_group)
        return table

    if meshes.host_group is not None:
        loader.share_places(maximum)


def base_problems(config: JobConfig, run: RunDirectory) -> list[Problem]:
    """Problems of [lora] with a run that resumes: checkpoints without adapters, as an import writes them.

    Raises StateError where the run had adapters, and their frozen weights are missing.
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


class Checkpoints(TrainingCheckpoints):
    """Loads and saves the state of a run, with errors of a job: JobError where the disk refuses a save, as older checkpoints
    are intact. Collective, but for `listen`: every rank calls every method.

    state: the objects of a checkpoint. Extensions hear of each load; of step -1 where the state is the initial one.
    """

    def __init__(self, run: Run, store: Store, state: dict[str, Any]) -> None:
        limit = run.config.checkpoint.max_failed_saves
        super().__init__(store, state, self._check_saved, self._tell, limit)
        self._run = run

    def _tell(self, step: int) -> None:
        self._run.extensions.call("after_load", step)

    def load(self, begin: Callable[[dict[str, Any], Check], None] | None = None) -> float:
        """Load the newest checkpoint that verifies, or keep the state as built; the seconds it took.

        Without one, `begin(state, check)` fills the state of a fork. An import that nothing has trained yet gives the
        weights; all else stays as built. StateError if there was one; ConfigError if a save without waiting would not fit `checkpoint.staging_gib`.
        """
        started = time.perf_counter()
        with store_errors(self.store.path, StateError):
            if self.store.steps() == [0] and self._imported():
                step = self.store.load({"model": InDtypes.fp32(self.state["model"])})
            else:
                step = self.store.load(self.state, self._check_saved)
        if step is None:
            self._begin(begin)

        self.set_loaded(-1 if step is None else step)
        seconds = time.perf_counter() - started
        config = self._run.config.checkpoint
        if config.every_steps and not config.wait:
            with store_errors(self.store.path, ConfigError):
                self.store.prepare(self.state)
        return seconds

    def _begin(self, begin: Callable[[dict[str, Any], Check], None] | None) -> None:
        """Fill the state of a run without a checkpoint. StateError if it had one, as it would remove its metrics."""
        run = self._run.folder
        saved = [e.get("step") for e in read_events(run.events) if e.get("event") == "save"]
        if saved:
            rule = f"holds no checkpoint, and {run.events.name} next to it records a save of step {saved[-1]}"
            fix = f"restore them; to begin anew choose another run.dir, or remove {run.events.name}, too"
            raise invalid("", "lost", str(self.store.path), rule, fix, kind=StateError)

        if begin is not None:
            begin(self.state, self._check_saved)
        elif run.imported.exists():
            rule = f"holds no checkpoint, and {run.imported.name} next to it is of imported weights"
            fix = "import them again, or remove that file to begin from fresh ones"
            raise invalid("", "not_found", str(self.store.path), rule, fix, kind=StateError)

    def go_back(self, latest: int, wanted: int, first: int = 0) -> bool:
        """As `TrainingCheckpoints.go_back`; an import is no state to go back to."""
        with store_errors(self.store.path, StateError):
            imported = 0 in self.store.steps() and self._imported()
            return super().go_back(latest, wanted, max(first, int(imported)))

    def settle(self) -> list[int]:
        """As `TrainingCheckpoints.settle`; errors of the disk become a JobError."""
        with store_errors(self.store.path, JobError, JobError):
            return super().settle()

    def save(self, step: int, wait: bool, metrics: Mapping[str, float] | None = None) -> None:
        """As `TrainingCheckpoints.save`; errors of the disk become a JobError."""
        with store_errors(self.store.path, JobError, JobError):
            super().save(step, wait, metrics)

    def _imported(self) -> bool:
        """Whether an import wrote step 0."""
        return IMPORTED in self.store.inspect(0)["objects"]

    def _check_saved(self, step: int, saved: Mapping[str, Any]) -> None:
        """Numbers that a checkpoint holds twice must agree: the step, and the position in the data."""
        progress, cursor = saved["progress"], saved["loader"]["cursor"]
        if progress["step"] != step:
            rule = f"must be {step}, the step of the checkpoint"
            raise invalid("progress.step", "mismatch", progress["step"], rule)
        tokens = self._run.course.tokens(cursor, saved["loader"].get("skipped", ()))
        if progress["tokens"] == tokens:
            return
        # the checkpoint is not damaged, so it must not be quarantined
        if saved["loader"]["fingerprint"] != self._run.loader.stream.fingerprint():
            rule = (
                f"must keep the sequences of phases that have begun: the run has seen {progress['tokens']:,} tokens in "
                f"{cursor:,} sequences, which are {tokens:,} in these phases"
            )
            fix = "restore them, or begin a run with init.from"
            raise invalid("data.phases", "changed", ..., rule, fix, kind=StateError)
        rule = f"must be {tokens}, those of loader.cursor {cursor}"
        raise invalid("progress.tokens", "mismatch", progress["tokens"], rule)
