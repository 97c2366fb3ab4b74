"""Hugging Face families: names of tensors and keys of configurations, as data.

`FAMILIES` has them by `model_type`, `find_family` finds the one of a `config.json`, and `PretrainedFolder` loads a folder.
"""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import invalid
from forge_core.families.dense import GRANITE, LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from forge_core.families.family import Family
from forge_core.families.folders import PretrainedFolder, save_folder
from forge_core.families.gemma import GEMMA3
from forge_core.families.mixtures import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)

__all__ = [
    "DEEPSEEK_V3",
    "DENSE_FAMILIES",
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
    "PretrainedFolder",
    "find_family",
    "save_folder",
]

#: Those without experts, which forge_core reads and writes by itself.
DENSE_FAMILIES = {
    family.name: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA3, GRANITE, SMOLLM3, PHI3)
}
_MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE, DEEPSEEK_V3, GPT_OSS)
FAMILIES = DENSE_FAMILIES | {family.name: family for family in _MIXTURES}


def find_family(hf: Mapping[str, Any], families: Mapping[str, Family] = FAMILIES) -> Family:
    """Return the family of a `config.json` as a dict, by its model_type; ValueError for an unknown one."""
    name = hf.get("model_type")
    if isinstance(name, str) and name in families:
        return families[name]
    fix = f"use one of {', '.join(families)}"
    raise invalid("model_type", "unknown", name, "cannot be held", fix)
