"""How a step of a run was trained, by the run's journal, and a private job that trains the steps again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ckpt import SavedTensors
from forge_lab._shared.problems import Problem, invalid
from forge_resilience import read_events
from forge_train import ResolvedJob, RunDirectory, read_layers, resolve
from forge_train.errors import ConfigError, StateError, refuse
from forge_train.toolkit import IMPORTED, is_fixed, run_layers, store_errors

#: Tables that change no number of a step and act on the world outside.
_OUTSIDE = (
    "health",
    "profile",
    "metrics.sinks",
    "resilience.alerts",
    "resilience.watch",
    "resilience.replicas",
)
_QUIET = {
    "metrics.console": "off",
    "metrics.tensorboard": False,
    "metrics.gradients_every_steps": 0,
    "health.at_start": False,
    "eval.at_start": False,
    "sample.max_new_tokens": 0,
}
Event = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """The events that made a run: those that a later restart or a rollback undid are not among them.

    `attempts` are events `start` and `resume`, each of a later step than the one before, and `rollbacks` are events
    `rollback`, by rising `to_step`.
    """

    attempts: Sequence[Event]
    rollbacks: Sequence[Event]

    @property
    def begin(self) -> int:
        """The step before the first one of the run: its parent's step for a fork that kept the cursor, else 0."""
        return int(self.attempts[0]["step"]) if self.attempts else 0

    @property
    def total_steps(self) -> int | None:
        """The length of the run, by its last attempt; None for a run that has not begun."""
        return int(self.attempts[-1]["total_steps"]) if self.attempts else None

    def world_size_of(self, step: int) -> int | None:
        """Processes of the attempt that trained `step`; of the last one for a step that was never trained."""
        attempts = [event for event in self.attempts if event["step"] < step] or self.attempts
        return int(attempts[-1]["world_size"]) if attempts else None

    def world_size_for(self, step: int) -> int | None:
        """Processes for a replay: those that trained `step`, if [parallel] is still the same, else the newest."""
        moved = any(key.startswith("parallel.") for key in self.changed_since(step))
        return self.world_size_of(self.attempts[-1]["step"] + 1 if moved else step)

    def changed_since(self, step: int) -> dict[str, list[Any]]:
        """{key: [value when `step` was trained, value of the last attempt]} of keys that later attempts changed."""
        later = (event for event in self.attempts if event["step"] >= step)
        return merge_changes(*(event.get("changed", {}) for event in later))


def merge_changes(*changes: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Merge {key: [before, after]} of several changes in sequence; a key that is back at its value is left out."""
    found: dict[str, list[Any]] = {}
    for each in changes:
        for key, (before, after) in each.items():
            found[key] = [found.get(key, [before])[0], after]
    return {key: values for key, values in found.items() if values[0] != values[1]}


def read_journal(run: Path) -> Journal:
    """Read the journal of a run; an empty one for a folder without a journal."""
    attempts: list[Event] = []
    rollbacks: list[Event] = []
    saved: dict[int, list[Event]] = {}  # step of a checkpoint -> rollbacks before it

    for event in read_events(RunDirectory(run).events):
        kind, step = event.get("event"), event.get("step", 0)
        if kind == "save":
            saved[step] = rollbacks
        elif kind == "rollback":
            to_step = event["to_step"]
            rollbacks = [*(e for e in rollbacks if e["to_step"] < to_step), event]
        elif kind in ("start", "resume"):
            undone = [earlier for earlier in attempts if earlier["step"] >= step]
            kept = attempts[: len(attempts) - len(undone)]
            changed = merge_changes(*(e.get("changed", {}) for e in (*undone, event)))
            attempts = [*kept, {**event, "changed": changed}]
            rollbacks = saved.get(step, [])
    return Journal(attempts, rollbacks)


def find_start(run: Path, step: int) -> int:
    """The step to begin a replay of `step` from: the newest checkpoint before it, or else the initial state.

    The initial state is step 0, or the parent's step for a fork that goes on there. StateError where neither can be
    loaded: the weights of an import are only in its checkpoints.
    """
    paths = RunDirectory(run)
    paths.require_run()
    journal = read_journal(run)
    begin, last = journal.begin, journal.total_steps
    if step <= begin or (last is not None and step > last):
        rule = f"must be from {begin + 1} to {last or 'the last'}, the steps of {run}"
        raise invalid("--step", "range", step, rule, "name one of them", kind=ConfigError)

    steps = sorted(paths.committed())
    before = [s for s in steps if s < step]
    if before:
        return before[-1]
    if paths.imported.is_file() and read_layers(paths.config).at("init.from") in (None, "none"):
        rule = f"must be after a checkpoint of {run}, whose initial weights were imported"
        fix = f"name a step after one of {steps}" if steps else "it has no checkpoint"
        raise invalid("--step", "imported", step, rule, fix, kind=StateError)
    return begin


def private_job(
    run: Path,
    start: int,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    callbacks: bool = False,
) -> ResolvedJob:
    """The job that goes on from the run's checkpoint of step `start`, or begins as the run did, in `folder`.

    It has no sinks, alerts, probes and console, and its own callbacks only with `callbacks`. `settings` are keys that
    replace those of the run, such as another layout; ConfigError for one that makes another experiment.
    """
    paths = RunDirectory(run)
    layers = run_layers(paths)
    layers.replace_old_keys()
    for table in (*_OUTSIDE, *(() if callbacks else ("callbacks",))):
        layers.drop_table(table)

    if start in paths.committed():
        checkpoint = paths.checkpoint(start)
        with store_errors(paths.checkpoints, StateError), SavedTensors(checkpoint) as saved:
            objects = saved.keys()
        seed = layers.at("init.seed")
        layers.drop_table("init")
        layers.set("init.from", str(checkpoint.absolute()), "replay")
        keep = ["weights"] if IMPORTED in objects else ["weights", "optimizer", "cursor"]
        layers.set("init.keep", keep, "replay")
        if seed is not None:
            layers.set("init.seed", seed, "replay")
    elif paths.parent.is_file():
        # init.from of the run may name "the newest checkpoint", which has changed since
        layers.set("init.from", json.loads(paths.parent.read_text())["checkpoint"], "replay")

    for key, value in (_QUIET | {"run.dir": str(folder)} | dict(settings or {})).items():
        layers.set(key, value, "replay")
    wrong = [key for key in settings or {} if is_fixed(key) or key.startswith(("run.", "init."))]
    rule = f"makes another experiment of {run}"
    fix = "set keys of [parallel], or how often something is done"
    refuse([Problem(f"--{key}", "fixed", ..., rule, fix) for key in wrong])
    return resolve(layers)


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Keys and values of `KEY=VALUE`, values as in TOML; a word without quotes is a string."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            fix = "write --set parallel.tp=1"
            raise invalid("--set", "form", pair, "must be KEY=VALUE", fix, kind=ConfigError)
        try:
            found[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value
    return found
