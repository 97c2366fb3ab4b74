"""Entrances for code: a job from a TOML file, the model of a finished run, and that of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_ckpt import Store
from forge_ckpt.stage_state import tensor_names
from forge_core import initialise
from forge_core.lora import merge
from forge_data import Tokenizer, load_tokenizer
from forge_parallel import materialise, store_parameters
from forge_train.config.layers import read_layers
from forge_train.config.resolve import ResolvedJob, resolve
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, StateError, config_errors, refuse
from forge_train.hf.folder import read_model
from forge_train.trainer.adapters import add_lora, frozen_names
from forge_train.trainer.build import build_model, run_tokenizer
from forge_train.trainer.frozen_base import FrozenBase, base_problems
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.store_errors import store_errors


def load_job(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, with_data: bool = True
) -> ResolvedJob:
    """The checked job of a TOML file; `overrides` are dotted keys, as flags on the command line.

    With `with_data` False its token files need not exist (for a plan).

    Raises ConfigError or DataError with all problems.
    """
    layers = read_layers(Path(path))
    for key, value in (overrides or {}).items():
        layers.set(key, value, "flag")
    return resolve(layers, with_data=with_data)


def load_trained(
    run_dir: str | Path, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Tokenizer, int]:
    """(model, tokenizer, step) of a run's newest good checkpoint, otherwise as `load_model`."""
    model, config, step = load_model(run_dir, device)
    return model, run_tokenizer(config), step


def load_model(
    run_dir: str | Path, device: torch.device | str = "cpu", step: int | None = None
) -> tuple[nn.Module, JobConfig, int]:
    """(model in eval mode with fp32 weights, configuration, step) of a run's newest good checkpoint, or that of `step`.

    Adapters are added to the weights. Reads only: a run that is still training is not disturbed.
    Raises ConfigError when `run_dir`
    is no run or its checkpoints are of another model, StateError when none of them can be used.
    """
    paths = RunDirectory(run_dir)
    if paths.imported.exists() and not paths.config.exists():
        raise ConfigError(
            [
                f"{run_dir} is an import that no run has trained; generate from the folder that was imported, or train "
                f"first: forge-train run JOB.toml --run.dir {run_dir}"
            ]
        )
    if not paths.config.exists():
        raise ConfigError(
            [f"{run_dir} has no {paths.config.name}; name the folder of a run, as in run.dir"]
        )
    job = load_job(paths.config, {"run.dir": str(run_dir)})  # it may have been moved
    config = job.config
    model = build_model(config.model, config.init_seed)
    store_parameters(model, config.parallel.param_dtype)
    adapters = config.lora.adapters
    frozen = set[str]()
    if adapters is not None:
        add_lora(model, config.lora, base_dtype=None)
        frozen = frozen_names(model)
    model = materialise(model, torch.device(device))
    refuse(base_problems(config, paths))
    state, base = {"model": model}, None
    if adapters is not None:
        base = FrozenBase(paths.base, model, tensor_names(model), frozen)
        state = base.objects()
    # buffers that a checkpoint need not hold
    built_in = config.model.is_built_in
    initialise(model, config.init_seed, strict=built_in, by_kind=built_in)
    with (
        store_errors(paths.checkpoints, StateError),
        Store(paths.checkpoints, read_only=True) as store,
    ):
        steps = store.steps()
        if step is not None and step not in steps:
            raise StateError(
                [
                    f"step {step} is not one of {steps}, the checkpoints of {run_dir}; name one of them"
                ]
            )
        loaded = store.load(state, newest=step)
    store_parameters(model, "fp32")
    if step is not None and loaded != step:
        raise StateError(
            [f"the checkpoint of step {step} in {run_dir} is damaged; name another of {steps}"]
        )
    if loaded is None:
        raise StateError(
            [
                f"{paths.checkpoints} holds no checkpoint; train first: forge-train run {paths.config}"
            ]
        )
    if base is not None:
        base.load()
        merge(model)
    return model.eval(), config, loaded


def load_folder(
    folder: str | Path, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Tokenizer]:
    """(model in eval mode with fp32 weights, tokenizer) of a folder as transformers' `save_pretrained` writes it.

    Raises ConfigError for a family or an option that Forge does not have, tensors that do not fit, and a folder
    without tokenizer.json.
    """
    found = read_model(Path(folder))
    path = found.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            [f"{folder} has no {path.name}, which makes text of ids; put the model's own there"]
        )
    model = materialise(build_model(found.section, 0), torch.device(device))
    initialise(model, 0)  # buffers that the folder need not hold
    found.load(model)
    with config_errors():
        tokenizer = load_tokenizer(str(path))
    end = found.hf.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end  # the first of several
    if isinstance(end, int):
        tokenizer.eos_id = end
    return model.eval(), tokenizer
