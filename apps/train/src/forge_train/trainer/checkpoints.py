"""Checkpoints of a run: their content, the resume, and the save of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import forge_data
from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, RNGState, Store, StoreInUse
from forge_ckpt.stage_state import NamedState, StageState, tensor_names
from forge_core.optim import IdleOptimizer
from forge_data import Loader
from forge_parallel import Meshes
from forge_train.errors import ConfigError, DataError, JobError, StateError
from forge_train.trainer.callbacks import Callback, state_name
from forge_train.trainer.progress import Progress


def checkpoint_state(
    model: nn.Module,
    optimizer: Any,
    loader: Loader,
    progress: Progress,
    callbacks: Sequence[Callback],
    names: set[str],
    meshes: Meshes,
) -> dict[str, Any]:
    """The objects of a checkpoint, by name; `names` are the tensors of the whole model, of which this rank has some."""
    others = names - tensor_names(model)

    def own(state: Any) -> Any:
        return state if meshes.pp.size == 1 else StageState(state, others)

    state = {
        "model": own(model),
        "optimizer": own(NamedState.of(optimizer, model, names)),
        "loader": loader,
        "progress": progress,
        "rng": RNGState(alike=meshes.tp.size),
    }
    if isinstance(optimizer, IdleOptimizer):
        del state["optimizer"]
    for callback in callbacks:
        if hasattr(callback, "state_dict"):
            state[state_name(callback, state)] = callback
    return state


class Checkpoints:
    """Loads and saves the state of a run. Collective: every rank calls every method.

    last_step: the step of the newest checkpoint that was loaded or saved, -1 without one.
    """

    def __init__(self, store: Store, path: Path, state: dict[str, Any], seq_len: int) -> None:
        self.last_step = -1
        self._store, self._path, self._state, self._seq_len = store, path, state, seq_len

    def load(self) -> float:
        """Load the newest checkpoint that verifies, or keep the state as built; the seconds it took."""
        started = time.perf_counter()
        with store_errors(self._path, StateError):
            step = self._store.load(self._state, self._check_saved)
        self.last_step = -1 if step is None else step
        return time.perf_counter() - started

    def save(self, step: int) -> float:
        """Commit the state of `step`; the seconds it took. JobError where the disk refuses: the older
        checkpoints are intact."""
        started = time.perf_counter()
        with store_errors(self._path, JobError):
            self._store.save(step, self._state)
        self.last_step = step
        return time.perf_counter() - started

    @property
    def set_aside(self) -> list[tuple[int, str]]:
        """(step, reason) of the checkpoints that `load` found damaged."""
        return list(self._store.set_aside)

    def _check_saved(self, step: int, saved: Mapping[str, Any]) -> None:
        """Numbers that a checkpoint holds twice must agree: the step, and the position in the data."""
        progress, cursor = saved["progress"], saved["loader"]["cursor"]
        if progress["step"] != step:
            raise ValueError(f"progress.step {progress['step']} is not that of step {step}")
        tokens = cursor * self._seq_len
        if progress["tokens"] != tokens:
            raise ValueError(
                f"progress.tokens {progress['tokens']} are not the {tokens} of loader.cursor {cursor}"
            )


@contextlib.contextmanager
def store_errors(checkpoints: Path, unusable: type[JobError]) -> Iterator[None]:
    """Turn an exception of forge_ckpt into a JobError of one line; `unusable` if disk or values are the cause."""
    try:
        yield
    except StoreInUse as error:
        raise ConfigError([f"run.dir {checkpoints.parent} is in use: {error}"]) from error
    except CheckpointMismatch as error:
        raise ConfigError(
            [f"{checkpoints}: {error}", "choose another run.dir, if they are of another job"]
        ) from error
    except CorruptCheckpoint as error:
        raise StateError([str(error)]) from error
    except forge_data.InvalidData as error:  # the checkpoint's data is not the run's
        raise DataError([f"{checkpoints}: {error}"]) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({error.filename})"
        raise unusable([f"{checkpoints}: {error.strerror or error}{file}"]) from error
    except ValueError as error:
        raise unusable([f"{checkpoints}: {error}"]) from error
