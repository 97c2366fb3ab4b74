"""A hook of your own: how far each matrix has moved from where it started.

forge-train run examples/weight_norms.toml
"""

from __future__ import annotations

import json
from typing import Any

import torch

from forge_train import Callback, Trainer


class WeightNorms(Callback):
    """Writes <run.dir>/weight_norms.jsonl: a row per logged step, parameter name -> relative distance."""

    def on_start(self, trainer: Trainer) -> None:
        self.first = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        writes = trainer.meshes.rank == 0  # all ranks compute the norms
        self.file = (trainer.paths.path / "weight_norms.jsonl").open("a") if writes else None

    @torch.no_grad()
    def on_log(self, trainer: Trainer, row: Any) -> None:
        moved = {
            name: float((p - self.first[name]).norm() / self.first[name].norm())
            for name, p in trainer.model.named_parameters()
            if p.ndim >= 2
        }
        if self.file is not None:
            self.file.write(json.dumps({"step": row["step"], **moved}) + "\n")

    def on_end(self, trainer: Trainer) -> None:
        if self.file is not None:
            self.file.close()
