"""Hooks into a run: subclass Callback, and pass objects to the Trainer or name the class in [callbacks.NAME]."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train._shared.misspelled import misspells
from forge_train._shared.problems import Problem, invalid
from forge_train.build.rules import find_callbacks
from forge_train.config.schema import CallbackConfig
from forge_train.errors import ConfigError, config_errors
from forge_train.run.extension import Extension
from forge_train.run.run import Run

#: A forge_train.Trainer, which imports this module.
Trainer = Any


class Callback(Extension):
    """All methods do nothing; override what you need. Each is called on every rank: what writes a file or a line does so
    where `trainer.meshes.rank` is 0.

    An exception in a callback ends the run: a hook that fails silently would be a wrong result.
    A callback with `state_dict`/`load_state_dict` is saved in and restored from checkpoints. On many
    ranks each has its own object; of plain values that of rank 0 is saved and given to all.
    """

    every_steps = 1
    """Steps between calls of `on_step_end`; a table's key of that name replaces it."""

    trainer: Trainer
    """Set by the Trainer that it is given to."""

    def on_start(self, trainer: Trainer) -> None:
        """After resuming, before the first step."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After each optimizer step; `trainer.progress.step` has just been done."""

    def on_log(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        """For each row of metrics.jsonl, with the weights of its step: before the next update, or before a save. It may
        run the model in eval mode, without gradients."""

    def on_evaluation(self, trainer: Trainer, name: str, result: float) -> None:
        """After each evaluation, for each set of validation data ("validation" is [data.validation]): its loss
        in nats per token."""

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        """After the checkpoint of a step is committed: `path` is complete, and a resume can use it."""

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        """After the run went back to the checkpoint of `step`: forget what was seen of later steps. States that
        `load_state_dict` takes are loaded before."""

    def on_end(self, trainer: Trainer) -> None:
        """Once, after the last save, whether finished or stopped."""

    # ---- hooks of an extension

    def start(self, run: Run) -> None:
        self.on_start(self.trainer)

    def after_step(self, step: int) -> None:
        if step % self.every_steps == 0:
            self.on_step_end(self.trainer)

    def on_row(self, row: Mapping[str, Any]) -> None:
        self.on_log(self.trainer, row)

    def on_evaluated(self, name: str, value: float) -> None:
        self.on_evaluation(self.trainer, name, value)

    def on_saved(self, step: int, path: Path) -> None:
        self.on_checkpoint(self.trainer, step, path)

    def after_rollback(self, step: int) -> None:
        self.on_rollback(self.trainer, step)

    def finish(self) -> None:
        self.on_end(self.trainer)


def load_callbacks(tables: Mapping[str, CallbackConfig]) -> list[Extension]:
    """The callbacks of a configuration; ConfigError for an object that is no Callback or Extension."""
    callbacks: list[Extension] = []
    for name, make in find_callbacks(tables).items():
        with config_errors():
            made = make()
        kind = Extension if tables[name].every_steps is None else Callback
        if not isinstance(made, kind):
            key = f"callbacks.{name}.name"
            rule = f"must make a forge_train.{kind.__name__}, and makes a {type(made).__name__}"
            fix = "derive it from that class"
            raise invalid(key, "type", tables[name].name, rule, fix, kind=ConfigError)
        if isinstance(made, Callback) and (every := tables[name].every_steps) is not None:
            made.every_steps = every
        callbacks.append(made)
    return callbacks


def hook_problems(callbacks: Sequence[Extension]) -> list[Problem]:
    """A problem for each hook that does not take the arguments of its call, and for each method that is almost a hook."""
    hooks, found = dict(inspect.getmembers(Callback, inspect.isfunction)), []
    for callback in callbacks:
        for name in dir(type(callback)):  # inherited ones, too
            near = [hook for hook in hooks if misspells(name, hook) and not hasattr(Callback, name)]
            if near and callable(getattr(callback, name)):
                key, rule = f"{type(callback).__qualname__}.{name}", "is not the name of a hook"
                fix = f"name it {near[0]}, or otherwise if it is no hook"
                found.append(Problem(key, "misspelled", ..., rule, fix))

    for hook, base in hooks.items():
        _, *wanted = inspect.signature(base).parameters
        for callback in callbacks:
            if not hasattr(callback, hook):  # only callbacks have it
                continue
            try:
                inspect.signature(getattr(callback, hook)).bind(*wanted)
            except TypeError as error:
                key, rule = f"{type(callback).__qualname__}.{hook}", f"cannot be called: {error}"
                fix = f"take the arguments of {hook}({', '.join(wanted)})"
                found.append(Problem(key, "signature", ..., rule, fix))
    return found


def state_keys(extensions: Iterable[Extension]) -> dict[str, Extension]:
    """Those that have a state, by its name in checkpoints: `extension.<name>`; of a callback its class, numbered where there
    are several. ConfigError for a name that is missing or there twice."""
    found: dict[str, Extension] = {}
    for extension in extensions:
        if not hasattr(extension, "state_dict"):
            continue

        kind, key = type(extension), f"extension.{extension.name}"
        if isinstance(extension, Callback):
            key = f"callback.{kind.__module__}.{kind.__qualname__}"
            number = sum(1 for other in found if other.split("#")[0] == key)
            key = f"{key}#{number + 1}" if number else key
        elif not extension.name or key in found:
            rule = "must be given and be that of no other extension, as it names a state in checkpoints"
            fix = "set `name` in the class"
            where = f"{kind.__qualname__}.name"
            raise invalid(where, "duplicate", extension.name, rule, fix, kind=ConfigError)
        found[key] = extension
    return found
