"""Hugging Face families: names of tensors and keys of configurations, as data.

`FAMILIES` has them by `model_type`, `find_family` finds the one of a `config.json`.
"""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import invalid
from forge_core.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3, Family
from forge_core.families.gemma import GEMMA3
from forge_core.families.gpt_oss import GPT_OSS
from forge_core.families.latent import DEEPSEEK_V3
from forge_core.families.mixtures import GLM4_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from forge_core.families.phi import PHI3
from forge_core.families.variants import GRANITE, OLMO2, SMOLLM3

__all__ = [
    "DEEPSEEK_V3",
    "FAMILIES",
    "GEMMA3",
    "GLM4_MOE",
    "GPT_OSS",
    "GRANITE",
    "LLAMA",
    "MISTRAL",
    "MIXTRAL",
    "OLMO2",
    "OLMOE",
    "PHI3",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "SMOLLM3",
    "Family",
    "find_family",
]

FAMILIES = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        OLMO2,
        GEMMA3,
        GRANITE,
        SMOLLM3,
        PHI3,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GLM4_MOE,
        DEEPSEEK_V3,
        GPT_OSS,
    )
}


def find_family(hf: Mapping[str, Any], families: Mapping[str, Family] = FAMILIES) -> Family:
    """The family of a `config.json` as a dict, by its model_type; ValueError for one that is not held."""
    name = hf.get("model_type")
    if isinstance(name, str) and name in families:
        return families[name]
    fix = f"use one of {', '.join(families)}"
    raise invalid("model_type", "unknown", name, "cannot be held", fix)
