"""The [model] table that an import left in a run directory: the lowest layer of jobs that run there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from forge_moe.model_section import TRAINING_OPTIONS
from forge_train._shared.hf_keys import training_rates
from forge_train._shared.problems import Problem, problems_of
from forge_train._shared.toml_files import flatten, read_toml
from forge_train.config.init import NAME
from forge_train.config.layers import Layers
from forge_train.errors import ConfigError, refuse

if TYPE_CHECKING:
    from forge_train.config.model import BuiltInModelConfig

#: Keys of [model] that change no output of the trained model: a job may set them as it likes.
TRAINING_KEYS = frozenset({"init_std", "max_seq_len", *(f"moe.{key}" for key in TRAINING_OPTIONS)})
DEFAULT_DIR = "runs/default"


def with_import(layers: Layers) -> Layers:
    """`layers` over the table of an import in run.dir; themselves without one."""
    run = layers.values.get("run")
    directory = run.get("dir", DEFAULT_DIR) if isinstance(run, dict) else DEFAULT_DIR
    if not isinstance(directory, str):
        return layers
    path = Path(directory) / NAME
    if not os.path.isfile(path):  # False for what is no path, too: another check refuses that
        return layers
    return over_import(layers, path)


def over_import(layers: Layers, path: Path) -> Layers:
    """`over_table` of the file of an import; ConfigError where it is no TOML."""
    try:
        table = read_toml(path)
    except ValueError as error:
        raise ConfigError(problems_of(error), str(path)) from error
    return over_table(layers, table, path)


def over_table(layers: Layers, table: dict[str, Any], path: Path) -> Layers:
    """`layers` over the [model] table of weights, which `path` came with.

    ConfigError for a key that gives those weights another meaning.
    """
    merged = Layers()
    merged.add(table, f"import {path}")
    for key, origin in layers.origins.items():
        merged.set(key, layers.at(key), origin)

    rule, fix = f"that of the weights that {path} came with", "leave the key out"
    rows = "add rows for tokens with init.vocab_size, or of an import with --init.vocab_size"
    problems = [
        Problem(
            key,
            "weights",
            layers.at(key),
            f"must be {value!r}, {rule}",
            f"{fix}, or {rows if key == 'model.vocab_size' else 'choose another run.dir'}",
        )
        for key, value in flatten(table)
        if _plain(merged.at(key)) != _plain(value)
        and key.removeprefix("model.") not in TRAINING_KEYS
    ]
    # another model has other keys: its name is the only problem then
    refuse([problem for problem in problems if problem.key == "model.name"] or problems)
    return merged


def _plain(value: Any) -> Any:
    """A tuple as the list that it is in a file."""
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def training_problems(path: Path) -> list[Problem]:
    """A problem for each rate of a `config.json` that acts in training, where Forge's model has none; of no file, none."""
    if not os.path.isfile(path):  # False for a name that is too long, which is reported later
        return []
    from forge_ckpt.hf import read_json

    found = training_rates(read_json(path))
    rule, fix = "acts in training, and Forge has none", f"set it to 0 in {path} to train without it"
    return [Problem(key, "training", rate, rule, fix) for key, rate in found.items()]


def table_of(section: BuiltInModelConfig, training: dict[str, Any]) -> dict[str, Any]:
    """The [model] table as plain values without options of training, but the length limit and those given."""
    left_out = TRAINING_KEYS - {"max_seq_len", "init_std"}
    plain = flatten(dataclasses.asdict(section))
    return {key: value for key, value in plain if key not in left_out and value != {}} | training


def training_options(section: BuiltInModelConfig) -> dict[str, Any]:
    """Options of training off their defaults, by key: those that a family of Hugging Face has no key for."""
    return {f"moe.{key}": value for key, value in section.moe.training_options().items()}


def write_table(path: Path, layer: dict[str, Any], comment: str) -> None:
    """Write model.toml."""
    path.write_text(f"# {comment}\n\n{tomlkit.dumps(layer)}", encoding="utf-8")
