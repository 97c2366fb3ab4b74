"""The frozen weights of a run with adapters, saved once beside its checkpoints, which hold the rest."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from torch import nn

from forge_ckpt import CheckpointMismatch, Keep, SavedTensors, Store, load_weights
from forge_ckpt.stage_state import StageState, tensor_names
from forge_parallel import Meshes
from forge_resilience import Agreement
from forge_train._shared.problems import Problem, invalid
from forge_train._shared.toml_files import read_toml
from forge_train.config.schema import JobConfig
from forge_train.errors import StateError, run_on_all_ranks
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.store_errors import store_errors


def base_problems(config: JobConfig, run: RunDirectory) -> list[Problem]:
    """Why a run that goes on cannot have adapters: its checkpoints were written without, by an import, say.

    Raises StateError where it had them, and the frozen weights are gone.
    """
    if not config.lora.rank or not run.has_checkpoints():
        return []
    if any(run.base.glob("step-*/manifest.json")):
        return []
    if _had_adapters(run):
        rule = "must hold the frozen weights of the run, and they are gone"
        raise invalid("base", "missing", str(run.base), rule, "restore it", kind=StateError)
    rule = f"needs {run.base}, the frozen weights, and {run.path} has checkpoints without"
    other = f"choose another run.dir and set init.from = '{run.path}'"
    fix = f"to train adapters of this run {other}, or restore the folder"
    return [Problem("lora.rank", "base", config.lora.rank, rule, fix)]


def _had_adapters(run: RunDirectory) -> bool:
    """As far as its config.toml tells."""
    try:
        return bool(read_toml(run.config)["lora"]["rank"])
    except (ValueError, LookupError, TypeError):
        return False


class PartOfModel:
    """The tensors of a model under some of its names, as an object of a checkpoint."""

    def __init__(self, model: nn.Module, names: Set[str]) -> None:
        self._model, self._names = model, frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        """{name: tensor}."""
        return {n: t for n, t in self._model.state_dict().items() if n in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load those tensors; the others stay."""
        self._model.load_state_dict(state, strict=False)


class FrozenBase:
    """The frozen weights of a run with adapters: a store whose newest step counts, and its digest in each checkpoint.

    names, frozen: of all tensors and of those weights in the whole model, of which `model` may be a stage. One
    process without `meshes`.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        names: Set[str],
        frozen: Set[str],
        agreement: Agreement | None = None,
        meshes: Meshes | None = None,
    ) -> None:
        self._path, self._model = path, model
        self._names, self._frozen = names, frozen
        self._agreement = agreement or Agreement()
        self._rank = 0 if meshes is None else meshes.rank
        self._group = None if meshes is None else meshes.host_group
        self._digest = ""

    def objects(self) -> dict[str, Any]:
        """What a checkpoint holds in place of the whole model: all that training changes, and this digest.

        A stage without an adapter has no part in "model", which would be saved as an empty object.
        """
        shown = self._model.state_dict().keys() - self._frozen
        return {"base": self} | ({"model": self._part(shown)} if shown else {})

    def _part(self, shown: Set[str]) -> StageState:
        others = self._names - tensor_names(self._model)
        return StageState(PartOfModel(self._model, shown), others)

    def state_dict(self) -> dict[str, Any]:
        """The digest of the weights that adapters were trained beside."""
        return {"digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the digest of a checkpoint, which `load` compares."""
        self._digest = state["digest"]

    def save(self) -> None:
        """Write the weights as they are now, durably, before the first checkpoint. Collective."""
        with (
            store_errors(self._path, StateError),
            Store(self._path, group=self._group, keep=Keep(last=1)) as store,
        ):
            # a life that ended before its first checkpoint may have left another base
            store.save(max(store.steps(), default=-1) + 1, {"model": self._part(self._frozen)})
        self._digest = self._found()

    def load(self) -> None:
        """Read the weights back, after a checkpoint was loaded. Collective.

        StateError where they are not those of the checkpoint, ConfigError where they are of another model.
        """
        with store_errors(self._path, StateError):
            digest = self._found()
            if digest != self._digest:
                rule = f"must be {self._digest[:12]}, that of the weights that the adapters were trained with"
                raise invalid(
                    "digest", "mismatch", digest[:12], rule, "restore the folder as it was"
                )
            report = load_weights(self._path, self._model, names=self._frozen, group=self._group)
            others = [*report.fresh, *report.unused]
            if others:
                rule, fix = (
                    "are only in one of the frozen weights and the model",
                    "build the model as it was",
                )
                raise invalid("", "model", others[:3], rule, fix, kind=CheckpointMismatch)

    def _found(self) -> str:
        """Its digest as rank 0 reads it, on all ranks."""

        def read() -> str:
            if self._rank:
                return ""
            with SavedTensors(self._path) as saved:
                return saved.digest

        return str(self._agreement.exchange(run_on_all_ranks(self._agreement, read))[0])
