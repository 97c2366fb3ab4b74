"""[lora]: the frozen weights of a run with adapters, saved once next to its checkpoints, which hold the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from forge_ckpt.frozen_base import FrozenBase
from forge_ckpt.stage_state import tensor_names
from forge_core.lora import adapter_lines, frozen_names
from forge_train._shared.problems import Problem
from forge_train.build.run_directory import RunDirectory
from forge_train.config.schema import JobConfig
from forge_train.errors import StateError
from forge_train.run.checkpoints import base_problems, store_errors
from forge_train.run.extension import Extension
from forge_train.run.run import Run


class Adapters(Extension):
    """Keeps the weights that [lora] freezes out of the checkpoints. `model` is not sharded yet."""

    def __init__(self, config: JobConfig, model: nn.Module) -> None:
        self._names, self._frozen = tensor_names(model), frozen_names(model)
        self._lines = adapter_lines(model, config.lora.patterns)

    @classmethod
    def of(cls, config: JobConfig, model: nn.Module) -> Adapters | None:
        return cls(config, model) if config.lora.rank else None

    def problems(self, config: JobConfig, world_size: int, total_steps: int) -> Iterable[Problem]:
        return base_problems(config, RunDirectory(config.run.dir))

    def around_run(self, run: Run) -> None:
        self._path, group = run.folder.base, run.meshes.host_group
        self._base = FrozenBase(self._path, run.model, self._frozen, self._names, group)

    def checkpoint_objects(self, objects: dict[str, Any]) -> dict[str, Any]:
        if not self._frozen:  # each weight is trained itself
            return objects
        return {k: v for k, v in objects.items() if k != "model"} | self._base.objects()

    def after_load(self, step: int) -> None:
        """Save them before the first checkpoint; read them back after others: bad steps may have changed them."""
        if self._frozen:
            with store_errors(self._path, StateError):
                self._base.save() if step < 0 else self._base.load()

    def start(self, run: Run) -> None:
        for line in self._lines:
            run.report(f"lora: {line}")
        config = run.job.config
        fresh = run.progress.step == 0 and config.init.from_ is None
        if fresh and self._frozen and config.model.is_built_in:
            run.report("init: init.from names no weights: those that [lora] freezes are random")
