"""Hooks into a run: subclass Callback, and pass objects to the Trainer or import paths in train.callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.config.names import find_named
from forge_train.config.schema import CALLBACKS_GROUP
from forge_train.errors import ConfigError

if TYPE_CHECKING:
    from forge_train.trainer.trainer import Trainer


class Callback:
    """All methods do nothing; override what you need.

    An exception in a callback ends the run: a hook that fails silently would be a wrong result.
    A callback with `state_dict`/`load_state_dict` is saved in and restored from checkpoints. On many
    ranks each has its own object; of plain values that of rank 0 is saved and given to all.
    """

    def on_start(self, trainer: Trainer) -> None:
        """After resuming, before the first step."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After each optimizer step; `trainer.progress.step` has just been done."""

    def on_log(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        """For each row, as it goes to metrics.jsonl."""

    def on_evaluation(self, trainer: Trainer, val_loss: float) -> None:
        """After each evaluation, in nats per token."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint is committed."""

    def on_end(self, trainer: Trainer) -> None:
        """Once, after the last save, whether finished or stopped."""


def load_callbacks(paths: tuple[str, ...]) -> list[Callback]:
    callbacks = []
    for path in paths:
        made = find_named(path, "train.callbacks", CALLBACKS_GROUP)()
        if not isinstance(made, Callback):
            raise ConfigError(
                [f"train.callbacks: {path!r} makes a {type(made).__name__}, which must be a "
                 "forge_train.Callback; derive it from that class"]
            )  # fmt: skip
        callbacks.append(made)
    return callbacks


def state_name(callback: Callback, taken: Mapping[str, Any]) -> str:
    """Name of a callback's state in checkpoints: its class, numbered when there are several."""
    kind = type(callback)
    name = f"callback.{kind.__module__}.{kind.__qualname__}"
    number = sum(1 for other in taken if other.split("#")[0] == name)
    return f"{name}#{number + 1}" if number else name
