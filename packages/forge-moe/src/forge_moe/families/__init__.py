"""Hugging Face families of expert blocks: names of tensors and keys of configurations, as data."""

from forge_moe.families.blocks import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    BlockFamily,
    ExpertLayers,
    LayersFamily,
)

__all__ = [
    "DEEPSEEK_V3",
    "FAMILIES",
    "GLM4_MOE",
    "GPT_OSS",
    "LAYERS",
    "MIXTRAL",
    "OLMOE",
    "QWEN2_MOE",
    "QWEN3_MOE",
    "BlockFamily",
    "ExpertLayers",
    "LayersFamily",
]

#: All of them by `model_type`.
FAMILIES = {
    family.name: family
    for family in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V3, GLM4_MOE, GPT_OSS)
}
#: All of them as `forge_ckpt.hf` reads them: the mixtures of a model and their layers.
LAYERS = {name: LayersFamily(block) for name, block in FAMILIES.items()}
