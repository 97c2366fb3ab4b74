"""Vision-language families of Hugging Face: names of tensors and keys of configurations, as data.

`FAMILIES` has them by `model_type`, in the form of `forge_core.families.Family`; their configs are `VLMConfig`s.
"""

from collections.abc import Mapping
from typing import Any

import forge_core.families
from forge_core.families import Family
from forge_vlm.families.chameleon import CHAMELEON
from forge_vlm.families.check_inputs import inputs_of
from forge_vlm.families.internvl import INTERNVL
from forge_vlm.families.keys import MODULES, module_name
from forge_vlm.families.llava import LLAVA
from forge_vlm.families.mllama import MLLAMA
from forge_vlm.families.qwen3_vl import QWEN3_VL
from forge_vlm.families.smolvlm import IDEFICS3, SMOLVLM

__all__ = [
    "CHAMELEON",
    "FAMILIES",
    "IDEFICS3",
    "INTERNVL",
    "LLAVA",
    "MLLAMA",
    "MODULES",
    "QWEN3_VL",
    "SMOLVLM",
    "find_family",
    "inputs_of",
    "module_name",
]

FAMILIES = {
    family.name: family
    for family in (LLAVA, IDEFICS3, SMOLVLM, INTERNVL, MLLAMA, QWEN3_VL, CHAMELEON)
}


def find_family(hf: Mapping[str, Any]) -> Family:
    """The family of a `config.json` as a dict, by its model_type; ValueError for one that is not held."""
    return forge_core.families.find_family(hf, FAMILIES)
