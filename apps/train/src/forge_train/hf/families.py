"""The built-in model as a family of Hugging Face: a decoder and, in mixtures, its experts, from two packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from forge_ckpt.hf import Row
from forge_core import TransformerConfig
from forge_core import families as decoders
from forge_moe import families as experts
from forge_moe.config import MoEConfig, MoEOptions
from forge_train._shared.problems import (
    Problem,
    ProblemError,
    invalid,
    problems_of,
    raise_problems,
    show,
)
from forge_train.config.experts import MoESection
from forge_train.config.imported import TRAINING_KEYS
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.vlm import VLMModelConfig
from forge_vlm import families as images

#: Fields that another parametrization becomes in the standard one.
_OF_MUP = ("residual_scale", "logits_scale", "attention.scale")
_FAR = {
    **{"model.mixer": 4, "model.moe.num_experts": 3},
    **{"model.norm": 2, "model.block": 2, "model.feed_forward": 2},
}
_BY_HAND = "write rows of your own and use forge_ckpt.hf.save_hf"


def section_from_hf(hf: Mapping[str, Any]) -> BuiltInModelConfig:
    """[model] of a `config.json` as a dict; ValueError with a line for each key that cannot be held."""
    if hf.get("model_type") in list(images.FAMILIES):  # of any value, a list too
        return VLMModelConfig(**vars(images.find_family(hf).config_from_hf(hf)))
    decoder = decoders.find_family(hf)
    config = decoder.config_from_hf(hf)
    block = experts.FAMILIES.get(decoder.name)
    moe = MoESection()
    if block is not None:
        moe = _moe_section(block.config_from_hf(hf), block.sparse_layers(hf), config)
    return BuiltInModelConfig(**vars(config), moe=moe)


def section_to_hf(section: BuiltInModelConfig, family: str) -> dict[str, Any]:
    """The keys of `config.json`; ValueError with a line for each option that the family cannot hold.

    Options of training alone (router losses, rates of the balancing bias, capacity) are not written.
    """
    written, misfits = _write(section, family)
    raise_problems(family, misfits)
    return written


def _write(section: BuiltInModelConfig, family: str) -> tuple[dict[str, Any], list[Problem]]:
    """The keys of `config.json`, and a problem without a fix for each option that the family cannot hold."""
    plain = _without_training(section).as_standard()
    if isinstance(section, VLMModelConfig):
        return _write_vlm(section, plain, family)
    block, layers, moe = experts.FAMILIES.get(family), plain.moe_layers, plain.moe
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("", lambda: decoders.FAMILIES[family].config_to_hf(plain))
    ]
    misfits: list[Problem] = []
    if (block is None) == bool(layers):
        rule = f"must be {'0' if layers else '1 or more'} in this family"
        misfits.append(Problem("model.moe.num_experts", "family", moe.num_experts, rule))
    elif block is not None:
        parts.append(("moe.", lambda: block.config_to_hf(_layer_config(plain))))
        parts.append(("moe.", lambda: block.layers_to_hf(layers, plain.num_layers)))
    written: dict[str, Any] = {}
    for table, part in parts:
        try:
            written |= part()
        except ValueError as error:
            misfits += [_misfit(section, table, problem) for problem in problems_of(error)]
    return written, misfits


def _write_vlm(
    section: VLMModelConfig, plain: BuiltInModelConfig, family: str
) -> tuple[dict[str, Any], list[Problem]]:
    """`_write` of a model with images, whose families have no mixtures of experts."""
    if num_experts := section.moe.num_experts:
        rule = "must be 0 in a family with images"
        return {}, [Problem("model.moe.num_experts", "images", num_experts, rule)]
    try:
        return images.FAMILIES[family].config_to_hf(plain), []
    except ValueError as error:
        return {}, [_misfit(section, "", problem) for problem in problems_of(error)]


def _misfit(section: BuiltInModelConfig, table: str, problem: Any) -> Problem:
    """A problem of a family with a field of `table`, about the key that the user has set."""
    key, code, value, rule = problem.key, problem.code, problem.value, problem.rule
    own: Any = section.moe if table else section
    if not hasattr(own, key.partition(".")[0]):
        return Problem(key, code, value, rule)
    cause: tuple[str, Any] | None = None
    if section.parametrization == "mup" and f"{table}{key}" in _OF_MUP:
        read = attrgetter(key)
        if read(section) != read(section.as_standard()):
            cause = ("parametrization", "mup")
    elif table and key == "expert_bias" and not section.moe.expert_bias:
        cause = ("moe.bias_update_rate", section.moe.bias_update_rate)
    if cause is None:
        return Problem(f"model.{table}{key}", code, value, rule)
    return Problem(f"model.{cause[0]}", code, cause[1], f"gives {key} {show(value)}, which {rule}")


def rows_of(section: BuiltInModelConfig, family: str) -> tuple[Row, ...]:
    """The rows of all tensors of the model: those of the decoder and those of its experts, or of its encoder."""
    if isinstance(section, VLMModelConfig):
        return images.FAMILIES[family].rows_of(section)
    block = experts.FAMILIES.get(family)
    rows = decoders.FAMILIES[family].rows_of(section)
    return rows if block is None else rows + block.rows(_layer_config(section))


def modules_of(section: BuiltInModelConfig, family: str) -> Callable[[str], str]:
    """What says the names of modules by those of tensors; ValueError for a family with images whose modules are unknown."""
    if not isinstance(section, VLMModelConfig):
        return str  # files of text models have the names of modules
    if family not in images.MODULES:
        rule = f"must be one of {', '.join(images.MODULES)}, whose modules peft is known to find"
        fix = "leave --adapter out, which writes the merged model"
        raise invalid("--family", "adapter", family, rule, fix)
    return partial(images.module_name, family)


def beside_of(section: BuiltInModelConfig, family: str) -> tuple[str, ...]:
    """Patterns of tensors in a folder of the family that are no part of the model."""
    return images.FAMILIES[family].beside if isinstance(section, VLMModelConfig) else ()


def family_of_origin(section: BuiltInModelConfig, original: Mapping[str, Any]) -> str | None:
    """The family of the `config.json` that weights began with; None where that is no family of such a model: a model with
    images may begin from text."""
    found = original.get("model_type")
    return found if found in _families(section) else None


def _families(section: BuiltInModelConfig) -> Mapping[str, Any]:
    return images.FAMILIES if isinstance(section, VLMModelConfig) else decoders.FAMILIES


def find_family(section: BuiltInModelConfig, wanted: str | None) -> str:
    """The name of the family that holds this model: the wanted one, or the first that does.

    Raises ValueError with what keeps the model from it, or from the family that comes nearest.
    """
    names = list(_families(section))
    if wanted is not None and wanted not in names:
        fix = f"use one of {', '.join(names)}"
        raise invalid("--family", "unknown", wanted, "is unknown", fix)
    misfits = {name: _write(section, name)[1] for name in names}
    holds = next((name for name in names if not misfits[name]), None)
    if wanted is not None:
        if not misfits[wanted]:
            return wanted
        fix = f"use --family {holds}" if holds else f"no other family holds the model: {_BY_HAND}"
        raise_problems(wanted, [dataclasses.replace(p, fix=fix) for p in misfits[wanted]])
    if holds is not None:
        return holds
    nearest = min(names, key=lambda name: sum(map(_distance, misfits[name])))
    origin = f"{nearest}, the nearest family"
    own = [dataclasses.replace(misfit, origin=origin) for misfit in misfits[nearest]]
    none = Problem("model", "no_family", ..., "is held by no family of Hugging Face", _BY_HAND)
    raise ProblemError([none, *own])


def _distance(misfit: Problem) -> int:
    """How far a family is from a model for one misfit: other tensors are farther than another number."""
    return _FAR.get(misfit.key, 1)


def _layer_config(section: BuiltInModelConfig) -> MoEConfig:
    return section.moe.layer_config(section.dim, section.resolved_hidden_dim)


def _without_training(section: BuiltInModelConfig) -> BuiltInModelConfig:
    """The section with options of training at their defaults, which leaves the function as it is."""
    moe = section.moe
    defaults: dict[str, Any] = {
        f.name: f.default
        for f in dataclasses.fields(MoESection)
        if f"moe.{f.name}" in TRAINING_KEYS
    }
    # a rate adds the bias that the function has
    bias = moe.expert_bias or moe.bias_update_rate > 0
    return dataclasses.replace(
        section, moe=dataclasses.replace(moe, **{**defaults, "expert_bias": bias})
    )


def _moe_section(moe: MoEConfig, sparse: tuple[int, ...], config: TransformerConfig) -> MoESection:
    """[model.moe] of an expert block; ValueError for layers that no step from a first one gives."""
    first = sparse[0] if sparse else config.num_layers
    step = sparse[1] - first if len(sparse) > 1 else config.num_layers
    if not sparse or sparse != tuple(range(first, config.num_layers, step)):
        rule = "are the layers with mixtures, and must be every n-th from a first one on"
        fix = "use a model whose mlp_only_layers leave such a pattern"
        raise invalid("mlp_only_layers", "pattern", list(sparse), rule, fix)
    same = {f.name: getattr(moe, f.name) for f in dataclasses.fields(MoEOptions)}
    return MoESection(
        num_experts=moe.num_experts,
        first_dense_layers=first,
        every_n_layers=step,
        width_multiplier=moe.hidden_dim / config.resolved_hidden_dim,
        **same,
    )
