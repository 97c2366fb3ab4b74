"""Idefics3 and SmolVLM as Hugging Face stores them: SigLIP on tiles, pixel shuffle, a decoder of a text family.

The two differ in the name of their model and of their encoder (arXiv 2408.12637, 2504.05299).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from forge_core import TransformerConfig
from forge_core.families import Family
from forge_vlm.adapters import AdapterConfig, PixelShuffleConfig
from forge_vlm.config import VLMConfig
from forge_vlm.families import keys
from forge_vlm.modalities import ModalityConfig

_READS = (
    *("text_config", "vision_config", "image_token_id", "scale_factor", "tie_word_embeddings"),
    "_pad_token_id",
)
# Keys of published files that transformers' models of these names do not read.
_UNREAD_TEXT = frozenset(
    [
        "_flash_attn_2_enabled",
        "neftune_noise_alpha",
        "perceiver_config",
        "pixel_shuffle_factor",
        "qk_layer_norms",
        "transformers.js_config",
        "use_resampler",
    ]
)
_UNREAD_VISION = frozenset(["max_image_size", "size", "tie_word_embeddings", "use_base_siglip"])
_TEXT = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_ARCHITECTURES = {
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}


def _from_hf(name: str, hf: Mapping[str, Any]) -> VLMConfig:
    known = {key: value for key, value in hf.items() if key != "transformers.js_config"}
    keys.check_keys(known, name, _READS)
    # the encoder's class follows from the model's, and whether the head is tied is said outside the decoder's table
    vision = {k: v for k, v in hf["vision_config"].items() if k not in _UNREAD_VISION}
    text = {k: v for k, v in hf["text_config"].items() if k not in _UNREAD_TEXT}
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings", False))
    _, decoder = keys.text_config({"text_config": text}, name)
    return VLMConfig(
        **vars(decoder),
        vision=keys.vision_from_hf({"vision_config": {**vision, "model_type": f"{name}_vision"}}),
        adapter=AdapterConfig(
            "pixel_shuffle", pixel_shuffle=PixelShuffleConfig(factor=hf.get("scale_factor", 2))
        ),
        modalities={"image": ModalityConfig(first_id=hf.get("image_token_id", 128257))},
    )


def _to_hf(name: str, config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, VLMConfig)
    vision = config.vision
    kind = vision.transformers.get("model_type")
    given = (
        ("fusion.name", config.fusion.name, "joint_decoder"),
        ("vision.name", vision.name, "transformers"),
        ("vision.transformers.model_type", kind, f"{name}_vision"),
        ("vision.select_layer", vision.select_layer, ()),
        ("adapter.name", config.adapter.name, "pixel_shuffle"),
        ("adapter.pixel_shuffle.bias", config.adapter.pixel_shuffle.bias, False),
        ("positions", config.positions, "sequential"),
        ("modalities", sorted(config.modalities), ["image"]),
        *keys.beyond_decoder(config),
    )

    keys.check_values(name, given)
    return {
        "model_type": name,
        "architectures": [_ARCHITECTURES[name]],
        "text_config": keys.family_of(config, _TEXT).config_to_hf(config),
        "vision_config": dict(vision.transformers),
        "image_token_id": config.modalities["image"].first_id,
        "scale_factor": config.adapter.pixel_shuffle.factor,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _rows(config: TransformerConfig) -> tuple[keys.Row, ...]:
    assert isinstance(config, VLMConfig)
    return (
        *keys.text_rows(keys.family_of(config, _TEXT), config, "model.text_model.", "lm_head."),
        *keys.encoder_rows(config, "model.vision_model."),
        ("model.connector.modality_projection.proj.weight", "adapter.proj.weight", ()),
    )


IDEFICS3 = Family("idefics3", (), partial(_from_hf, "idefics3"), partial(_to_hf, "idefics3"), _rows)
SMOLVLM = Family("smolvlm", (), partial(_from_hf, "smolvlm"), partial(_to_hf, "smolvlm"), _rows)
