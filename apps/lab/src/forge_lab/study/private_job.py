"""The job of a run as a private one: the same numbers from one of its checkpoints on, in another folder."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_ckpt import SavedTensors
from forge_lab._shared.problems import Problem, invalid
from forge_lab.study.journal import read_journal
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


def find_start(run: Path, step: int) -> int:
    """The step to begin from for a replay of `step`: that of the newest checkpoint before it, or that of the initial state,
    0 but for a fork that goes on at its parent's step.

    StateError where neither is there: an import, whose weights no checkpoint holds any more.
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
    elif paths.parent.is_file():  # init.from may name the newest checkpoint of a run that went on
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
