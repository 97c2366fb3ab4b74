"""Encoders by the name in a config."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_core.registry import Registry
from forge_vlm.vision.config import VisionConfig
from forge_vlm.vision.packed import PackedViT
from forge_vlm.vision.vit import ViT

__all__ = ["ENCODERS", "build_encoder", "check_encoder"]


def _transformers(config: VisionConfig) -> nn.Module:
    if config.transformers["model_type"] == "mllama_vision_model":
        from forge_vlm.vision.mllama import MllamaEncoder

        return MllamaEncoder(config)
    from forge_vlm.vision.patches import PATCH_MODELS, PatchEncoder
    from forge_vlm.vision.transformers import TransformersEncoder

    patches = config.transformers["model_type"] in PATCH_MODELS
    return PatchEncoder(config) if patches else TransformersEncoder(config)


ENCODERS = Registry(
    "model.vision.name",
    "forge.vision_encoders",
    ("config",),
    {"vit": ViT, "packed_vit": PackedViT, "transformers": _transformers},
)


def build_encoder(config: VisionConfig) -> Any:
    """The encoder of a config, None for "none": a module with `width`, `extra_inputs`, `forward(**media) -> Features`
    and `dummy(device) -> media`; with `blocks()` FSDP2 gathers those one by one. ValueError for a name that leads nowhere
    and options that it does not take."""
    if config.name == "none":
        return None
    build = ENCODERS.checked(config.name, config.options)
    return build(config, **config.options)


def check_encoder(config: VisionConfig) -> None:
    """Raise what `build_encoder` would for the name, the options and, with transformers, the keys; nothing is built."""
    if config.name == "none":
        return
    ENCODERS.checked(config.name, config.options)
    if config.name == "transformers":
        from forge_vlm.vision.transformers import build_config

        build_config(config.transformers)
