"""[model] as the parts that families of Hugging Face have maps of: a decoder and its experts, or a model with images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from forge_ckpt.hf import HFFamily, fitting_family, hf_families
from forge_moe.config import MoEOptions
from forge_moe.families import ExpertLayers
from forge_train._shared.problems import Problem, ProblemError, invalid, problems_of, show
from forge_train.config.experts import MoESection
from forge_train.config.imported import TRAINING_KEYS
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import config_errors
from forge_vlm.families import module_name

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
    configs: dict[str, Any] = {
        "vision" if isinstance(section, VLMModelConfig) else "decoder": plain
    }
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
    """A problem of a part of the model, about the key that the user has set."""
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
    elif section.parametrization == "mup" and f"{table}{name}" in _OF_MUP:
        read = attrgetter(name)
        if read(section) != read(section.as_standard()):
            key, value, rule = (
                "model.parametrization",
                "mup",
                f"gives {name} {show(value)}, which {rule}",
            )
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
    moe, layers, count = experts
    first = layers[0] if layers else count
    step = layers[1] - first if len(layers) > 1 else count
    if not layers or layers != tuple(range(first, count, step)):
        rule = "are the layers with mixtures, and must be every n-th from a first one on"
        fix = "use a model whose mlp_only_layers leave such a pattern"
        raise invalid("mlp_only_layers", "pattern", list(layers), rule, fix)
    return MoESection(
        num_experts=moe.num_experts,
        first_dense_layers=first,
        every_n_layers=step,
        width_multiplier=moe.hidden_dim / dense_hidden_dim,
        **{f.name: getattr(moe, f.name) for f in dataclasses.fields(MoEOptions)},
    )
