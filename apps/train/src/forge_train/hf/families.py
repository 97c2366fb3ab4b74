"""The built-in model as a family of Hugging Face: a decoder and, in mixtures, its experts, from two packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from forge_ckpt.hf import Row
from forge_core import TransformerConfig
from forge_core import families as decoders
from forge_moe import families as experts
from forge_moe.config import MoEConfig, MoEOptions
from forge_train.config.experts import MoESection
from forge_train.config.imported import TRAINING_KEYS
from forge_train.config.schema import BuiltInModelConfig


def section_from_hf(hf: Mapping[str, Any]) -> BuiltInModelConfig:
    """[model] of a `config.json` as a dict; ValueError with a line for each key that cannot be held."""
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
    section = _without_training(section)
    block = experts.FAMILIES.get(family)
    if (block is None) == bool(section.moe_layers):
        kinds = ("mixtures of experts", "dense feed-forwards")
        here, there = kinds if section.moe_layers else kinds[::-1]
        raise ValueError(
            f"{family}: model.moe.num_experts {section.moe.num_experts} gives {here}, and the family has {there}; "
            "choose another family"
        )
    parts = [lambda: decoders.FAMILIES[family].config_to_hf(section)]
    if block is not None:
        parts.append(lambda: block.config_to_hf(_layer_config(section)))
        parts.append(lambda: block.layers_to_hf(section.moe_layers, section.num_layers))
    written: dict[str, Any] = {}
    problems: list[str] = []
    for part in parts:
        try:
            written |= part()
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        raise ValueError("\n".join(problems))
    return written


def rows_of(section: BuiltInModelConfig, family: str) -> tuple[Row, ...]:
    """The rows of all tensors of the model: those of the decoder and those of its experts."""
    block = experts.FAMILIES.get(family)
    rows = decoders.FAMILIES[family].rows_of(section)
    return rows if block is None else rows + block.rows(_layer_config(section))


def find_family(section: BuiltInModelConfig, wanted: str | None) -> str:
    """The name of the family that holds this model: the wanted one, or the first that does.

    Raises ValueError with what keeps the model from it, or from the family that comes nearest.
    """
    names = list(decoders.FAMILIES)
    if wanted is not None:
        if wanted not in names:
            raise ValueError(f"family {wanted!r} is unknown; use one of {', '.join(names)}")
        section_to_hf(section, wanted)
        return wanted
    problems: list[str] = []
    for name in (n for n in names if (n in experts.FAMILIES) == bool(section.moe_layers)):
        try:
            section_to_hf(section, name)
        except ValueError as error:
            found = str(error).splitlines()
            problems = found if not problems or len(found) < len(problems) else problems
        else:
            return name
    raise ValueError(
        "\n".join(["no family of Hugging Face holds this model; the nearest:", *problems])
    )


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
        raise ValueError(
            f"mixtures in layers {list(sparse)} must be every n-th from a first one on; use a model whose "
            "mlp_only_layers leave such a pattern"
        )
    same = {f.name: getattr(moe, f.name) for f in dataclasses.fields(MoEOptions)}
    return MoESection(
        num_experts=moe.num_experts,
        first_dense_layers=first,
        every_n_layers=step,
        width_multiplier=moe.hidden_dim / config.resolved_hidden_dim,
        **same,
    )
