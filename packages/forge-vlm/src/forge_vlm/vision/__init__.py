"""Vision encoders: a plain ViT of one size or any, those of transformers, and what they offer to adapters."""

from forge_vlm.vision.build import (
    build_encoder,
    check_encoder,
    encoder_differences,
    encoder_tensors,
    find_encoder,
    pixel_differences,
    processor_pixels,
)
from forge_vlm.vision.config import VisionConfig, ViTConfig
from forge_vlm.vision.features import Features, cut_patches
from forge_vlm.vision.patches import num_layer_features
from forge_vlm.vision.vit import PackedViT, ViT

__all__ = [
    "Features",
    "PackedViT",
    "ViT",
    "ViTConfig",
    "VisionConfig",
    "build_encoder",
    "check_encoder",
    "cut_patches",
    "encoder_differences",
    "encoder_tensors",
    "find_encoder",
    "num_layer_features",
    "pixel_differences",
    "processor_pixels",
]
