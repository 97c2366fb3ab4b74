"""Folders and families of Hugging Face as [model]: a decoder and its experts, or a model with images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import forge_ckpt.hf
from forge_ckpt.hf import (
    HFFamily,
    HFTensors,
    fitting_family,
    hf_families,
    read_json,
    read_processor,
)
from forge_core import initialize
from forge_data.tokenizer_files import TOKENIZER_FILES
from forge_moe.config import MoEOptions
from forge_moe.families import ExpertLayers
from forge_moe.model_section import MoESection
from forge_parallel import materialize, store_parameters
from forge_train._shared.problems import Problem, ProblemError, invalid, problems_of, show
from forge_train.build.build import build_model
from forge_train.config.imported import TRAINING_KEYS, table_of, write_table
from forge_train.config.init import FILES, NAME
from forge_train.config.layers import Layers
from forge_train.config.model import BuiltInModelConfig, VLMModelConfig
from forge_train.config.structure import structure
from forge_train.errors import ConfigError, config_errors
from forge_vlm.families import module_name
from forge_vlm.vision import processor_pixels

#: Fields that another parametrization becomes in the standard one.
_OF_MUP = ("residual_scale", "logits_scale", "attention.scale")


def section_of(configs: Mapping[str, Any]) -> BuiltInModelConfig:
    """[model] of the configs of its parts."""
    if "vision" in configs:
        return VLMModelConfig(**vars(configs["vision"]))
    decoder, experts = configs["decoder"], configs.get("experts")
    moe = MoESection() if experts is None else _moe_section(experts, decoder.resolved_hidden_dim)
    return BuiltInModelConfig(**vars(decoder), moe=moe)


def configs_of(section: BuiltInModelConfig) -> dict[str, Any]:
    """The configs of its parts: in the standard parametrization, without options of training (router losses, rates of
    the balancing bias, capacity), which leaves the function as it is."""
    moe = section.moe
    defaults: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(moe) if f"moe.{f.name}" in TRAINING_KEYS
    }
    # a rate adds the bias that the function has
    bias = moe.expert_bias or moe.bias_update_rate > 0
    moe = dataclasses.replace(moe, **{**defaults, "expert_bias": bias})
    plain = dataclasses.replace(section, moe=moe).as_standard()
    part = "vision" if isinstance(section, VLMModelConfig) else "decoder"
    configs: dict[str, Any] = {part: plain}
    if moe.num_experts:
        config = moe.layer_config(plain.dim, plain.resolved_hidden_dim)
        configs["experts"] = ExpertLayers(config, tuple(plain.moe_layers), plain.num_layers)
    return configs


def family_of(
    section: BuiltInModelConfig, wanted: str | None, origin: str | None = None
) -> HFFamily:
    """The family that holds this model: the wanted one, that of the `config.json` that its weights began with, or the first.

    A model with images may have begun from text. Raises ValueError with what keeps the model from it, or from the nearest.
    """
    configs, families = configs_of(section), hf_families()
    if origin is not None and origin in families and configs.keys() & families[origin].parts.keys():
        wanted = wanted or origin
    try:
        return fitting_family(configs, wanted)
    except ValueError as error:
        found = [_own(section, problem) for problem in problems_of(error)]
        raise ProblemError(found, getattr(error, "where", "")) from error


def _own(section: BuiltInModelConfig, problem: Any) -> Problem:
    """Translate a problem of a submodule's config to the key that the user has set."""
    part, _, name = problem.key.partition(".")
    moe = part == "experts"
    table, own = ("moe.", section.moe) if moe else ("", section)
    key, code, value, rule = f"model.{table}{name}", problem.code, problem.value, problem.rule

    if part in ("family", "model"):
        key = "--family" if part == "family" else part
    elif not name:
        key, value = "model.moe.num_experts", section.moe.num_experts
        code = "images" if isinstance(section, VLMModelConfig) else code
    elif not hasattr(own, name.partition(".")[0]):
        key = name
    # values that follow from another key
    elif section.parametrization == "mup" and f"{table}{name}" in _OF_MUP:
        read = attrgetter(name)
        if read(section) != read(section.as_standard()):
            rule = f"gives {name} {show(value)}, which {rule}"
            key, value = "model.parametrization", "mup"
    elif moe and name == "expert_bias" and not section.moe.expert_bias:
        rule = f"gives {name} {show(value)}, which {rule}"
        key, value = "model.moe.bias_update_rate", section.moe.bias_update_rate
    return Problem(key, code, value, rule, problem.fix, problem.origin)


def modules_of(section: BuiltInModelConfig, family: str) -> Callable[[str], str]:
    """What says the names of modules by those of tensors; ConfigError for a family whose modules are unknown."""
    if not isinstance(section, VLMModelConfig):
        return str  # files of text models have the names of modules
    with config_errors("--family"):
        module_name(family, "")
    return partial(module_name, family)


def _moe_section(experts: ExpertLayers, dense_hidden_dim: int) -> MoESection:
    """[model.moe] of the mixtures of a model; ValueError for layers that no step from a first one gives."""
    first, step = experts.first_and_step()
    moe = experts.config
    return MoESection(
        num_experts=moe.num_experts,
        first_dense_layers=first,
        every_n_layers=step,
        width_multiplier=moe.hidden_dim / dense_hidden_dim,
        **{f.name: getattr(moe, f.name) for f in dataclasses.fields(MoEOptions)},
    )


SIDECAR = "forge.json"


class HFModel(forge_ckpt.hf.HFModel):
    """The model of a folder as a job has it: `section` is its [model], `table` the same as flat keys below it.

    ConfigError with a line for each key that cannot be held. `vocab_size` adds rows for tokens that the tokenizer has and
    the model has not.
    """

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        with config_errors():
            super().__init__(folder)
            section = section_of(self.configs)
            if isinstance(section, VLMModelConfig):
                pixels: Any = processor_pixels(read_processor(folder))
                section = replace(section, vision=replace(section.vision, **pixels))
            self.table = table_of(section, _sidecar(folder / SIDECAR))
            _, problems = structure(self.layer())
        # the only part of the table that is not ours is the sidecar's
        if own := [problem for problem in problems if problem.key.startswith("model")]:
            raise ConfigError(own, str(folder / SIDECAR))
        if vocab_size is not None:
            with config_errors("init"):
                self.add_rows(vocab_size)
            section = replace(section, vocab_size=vocab_size)
            self.table["vocab_size"] = vocab_size
        self.section = section

    def tensors(self) -> HFTensors:
        """The weights under Forge's names; ConfigError for what the family's maps cannot hold."""
        with config_errors():
            return super().tensors()

    def build(
        self, device: torch.device | str = "cpu", param_dtype: Literal["fp32", "bf16"] = "fp32"
    ) -> nn.Module:
        """The model in eval mode; ConfigError for tensors that do not fit."""
        model = build_model(self.section, 0)
        store_parameters(model, param_dtype)
        model = materialize(model, torch.device(device))
        initialize(model, 0)  # buffers that the folder need not hold
        with config_errors():
            self.load(model)
        return model.eval()

    def layer(self) -> dict[str, Any]:
        """{"model": table}, as a file of TOML would hold it."""
        layers = Layers()
        for key, value in self.table.items():
            layers.set(f"model.{key}", "none" if value is None else value, "import")
        return layers.values

    def files(self, more: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
        """The files that belong to the model, by name; ConfigError for one that is no such file by its size."""
        with config_errors():
            return super().files(more)

    def write(self, run_dir: Path, files: dict[str, bytes]) -> None:
        """Write model.toml, which jobs there get their [model] from, and what an export gives back: files, and tensors
        of the folder that are no part of the model."""
        (run_dir / FILES).mkdir(exist_ok=True)
        self.keep_beside(run_dir / FILES)
        for name, content in files.items():
            (run_dir / FILES / name).write_bytes(content)
        comment = "The model of the imported weights; jobs here get it"
        write_table(run_dir / NAME, self.layer(), comment)


read_model = HFModel


def _sidecar(path: Path) -> dict[str, Any]:
    """Options of training in the sidecar of a Forge export; empty without one."""
    if not path.exists():
        return {}
    table = read_json(path)
    model = table.get("model")
    if table.get("format") != 1 or not isinstance(model, dict) or not model.keys() <= TRAINING_KEYS:
        rule = f"must have format 1 and a table model of {', '.join(sorted(TRAINING_KEYS))}"
        fix = "remove the file, or use the version that wrote it"
        raise invalid("", "version", ..., rule, fix, where=path)
    return model
