"""The frozen weights of a fine-tuning, saved once next to its checkpoints, which hold the other tensors."""

import os
from collections.abc import Set
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.directories import newest_step
from forge_ckpt.errors import CheckpointMismatch
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.tensors import SavedTensors
from forge_ckpt.retention import Keep
from forge_ckpt.stage_state import SomeTensors, StageState, tensor_names
from forge_ckpt.store import Store
from forge_ckpt.weights import load_weights

__all__ = ["FrozenBase", "frozen_weights"]


class FrozenBase:
    """A store of frozen weights, whose newest step counts, and its digest in each checkpoint.

        base = FrozenBase("runs/a/base", model, frozen)
        base.save()                                                  # before the first checkpoint
        store.save(step, {"optimizer": optimizer, **base.objects()})
        store.load({"optimizer": optimizer, **base.objects()})       # later, into a model as it was built
        base.load()

    ``frozen`` are names of tensors of the whole model. ``names`` are all of its tensors where ``model`` is this rank's
    part of it, such as a pipeline stage. In a process group all ranks call ``save`` and ``load``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        frozen: Set[str],
        names: Set[str] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._path, self._model, self._frozen = user_path(path), model, frozen
        self._others = (names or set()) - tensor_names(model)
        self._group = group
        self._digest = ""

    def objects(self) -> dict[str, Any]:
        """What a checkpoint holds in place of the whole model: the tensors that training changes, and the digest.

        A stage without such a tensor has no "model", which would be saved as an empty object.
        """
        trained = self._model.state_dict().keys() - self._frozen
        return {"base": self} | ({"model": self._state_of(trained)} if trained else {})

    def state_dict(self) -> dict[str, Any]:
        """The digest of the frozen weights."""
        return {"digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the digest of a checkpoint, which ``load`` compares."""
        self._digest = state["digest"]

    def save(self) -> None:
        """Write the weights as they are now, durably."""
        with Store(self._path, group=self._group, keep=Keep(last=1)) as store:
            # a process that ended before its first checkpoint may have left another base
            newest = RankGroup(self._group).run_on_rank_0(lambda: newest_step(self._path))
            step = 0 if newest is None else newest + 1
            store.save(step, {"model": self._state_of(self._frozen)})
        self._digest = self._saved_digest()

    def load(self) -> None:
        """Read the weights back, after a checkpoint was loaded.

        Raises ValueError where they are not those of the checkpoint, CheckpointMismatch where they are of another model.
        """
        digest = self._saved_digest()
        if digest != self._digest:
            rule = f"must be {self._digest[:12]}, the digest of the weights of the checkpoint"
            fix = "restore the folder as it was"
            raise invalid("digest", "mismatch", digest[:12], rule, fix)
        report = load_weights(self._path, self._model, names=self._frozen, group=self._group)
        others = [*report.fresh, *report.unused]
        if others:
            rule = "are only in one of the frozen weights and the model"
            fix = "build the model as it was"
            raise invalid("", "model", others[:3], rule, fix, kind=CheckpointMismatch)

    def _state_of(self, names: Set[str]) -> StageState:
        return StageState(SomeTensors(self._model, names), self._others)

    def _saved_digest(self) -> str:
        """The digest of the store as rank 0 reads it, on all ranks."""

        def read() -> str:
            with SavedTensors(self._path) as saved:
                return saved.digest

        return str(RankGroup(self._group).run_on_rank_0(read))


def frozen_weights(path: str | os.PathLike[str], digest: str) -> dict[str, Tensor]:
    """The tensors of a base by name, on the meta device. Raises ValueError unless it has the digest that a checkpoint holds."""
    with SavedTensors(path) as saved:
        if saved.digest != digest:
            rule = "must be the base that its adapters were trained with"
            raise invalid("", "digest", str(path), rule, "restore it")
        return saved.below("model")
