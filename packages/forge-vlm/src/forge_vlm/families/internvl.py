"""InternVL 3 and 3.5 as Hugging Face stores them: InternViT on tiles, pixel shuffle, a decoder of a text family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core import TransformerConfig
from forge_core.families import Family
from forge_vlm._shared.problems import Problem, raise_problems
from forge_vlm.adapters import AdapterConfig, PixelShuffleMLPConfig
from forge_vlm.config import VLMConfig
from forge_vlm.families import keys
from forge_vlm.modalities import ModalityConfig
from forge_vlm.vision import VisionConfig

_READS = (
    *("text_config", "vision_config", "image_token_id", "downsample_ratio", "projector_hidden_act"),
    *("vision_feature_layer", "vision_feature_select_strategy", "tie_word_embeddings"),
)
_TEXT = ("qwen2", "qwen3", "llama", "mistral")


def _from_hf(hf: Mapping[str, Any]) -> VLMConfig:
    keys.check_keys(hf, "internvl", _READS)
    ratio, layer = hf.get("downsample_ratio", 0.5), hf.get("vision_feature_layer", -1)

    problems = [
        Problem(key, "unsupported", value, f"must be {rule}", "use a file of another model")
        for key, value, holds, rule in (
            ("downsample_ratio", ratio, _is_one_over(ratio), "one over a whole number"),
            ("vision_feature_layer", layer, isinstance(layer, int), "one layer"),
            *(
                (key, hf.get(key, wanted), hf.get(key, wanted) == wanted, repr(wanted))
                for key, wanted in (
                    ("projector_hidden_act", "gelu"),
                    ("vision_feature_select_strategy", "default"),
                )
            ),
        )
        if not holds
    ]

    raise_problems("internvl", problems)
    text = dict(hf["text_config"])
    text["tie_word_embeddings"] = hf.get("tie_word_embeddings", True)  # the decoder's is not read
    _, decoder = keys.text_config({"text_config": text}, "internvl")
    vision = {**hf["vision_config"], "model_type": "internvl_vision"}

    return VLMConfig(
        **vars(decoder),
        vision=keys.vision_from_hf(
            {"vision_config": vision},
            select_layer=() if layer == -1 else (layer,),
            select_feature="patch",
        ),
        adapter=AdapterConfig(
            "pixel_shuffle_mlp", pixel_shuffle_mlp=PixelShuffleMLPConfig(factor=int(1 / ratio))
        ),
        modalities={"image": ModalityConfig(first_id=hf.get("image_token_id", 151667))},
    )


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, VLMConfig)
    vision, factor = config.vision, config.adapter.pixel_shuffle_mlp.factor
    kind = vision.transformers.get("model_type")
    given = (
        ("fusion.name", config.fusion.name, "joint_decoder"),
        ("vision.name", vision.name, "transformers"),
        ("vision.transformers.model_type", kind, "internvl_vision"),
        ("vision.select_feature", vision.select_feature, "patch"),
        ("vision.select_layer", vision.select_layer, _one_layer(vision)),
        ("adapter.name", config.adapter.name, "pixel_shuffle_mlp"),
        ("positions", config.positions, "sequential"),
        ("modalities", sorted(config.modalities), ["image"]),
        *keys.beyond_decoder(config),
    )

    keys.check_values("internvl", given)
    return {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "text_config": keys.family_of(config, _TEXT).config_to_hf(config),
        "vision_config": dict(vision.transformers),
        "image_token_id": config.modalities["image"].first_id,
        "downsample_ratio": 1 / factor,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": vision.select_layer[0] if vision.select_layer else -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": config.tie_embeddings,
    }


def _is_one_over(ratio: Any) -> bool:
    return isinstance(ratio, int | float) and 0 < ratio <= 1 and (1 / ratio).is_integer()


def _one_layer(vision: VisionConfig) -> tuple[int, ...]:
    """What `vision_feature_layer` holds: of -1 it takes the encoder's end, which `select_layer` () is."""
    first = vision.select_layer[:1]
    return () if first == (-1,) else first


def _rows(config: TransformerConfig) -> tuple[keys.Row, ...]:
    assert isinstance(config, VLMConfig)
    names = {"layer_norm": "norm", "linear_1": "linear_1", "linear_2": "linear_2"}
    projector = tuple(
        (f"multi_modal_projector.{theirs}.{kind}", f"adapter.{ours}.{kind}", ())
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    )
    text = keys.family_of(config, _TEXT)
    return (
        *keys.text_rows(text, config, "language_model.model.", "language_model.lm_head."),
        *keys.encoder_rows(config, "vision_tower."),
        *projector,
    )


INTERNVL = Family("internvl", (), _from_hf, _to_hf, _rows)
