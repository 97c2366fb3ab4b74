"""The trunk of a study of forge-lab saves where its decays fork from it.

Configurations of studies name it by this path, and nodes that train need no forge-lab.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge_train.loop.trainer import Trainer
from forge_train.run.callback import Callback


class SaveAt(Callback):
    """Saves checkpoints at `steps`, whatever `checkpoint.every_steps` says."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = frozenset(steps)

    def on_start(self, trainer: Trainer) -> None:
        self.on_step_end(trainer)  # a life may begin one step before

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step + 1 in self.steps:
            trainer.request_save()
