"""LLaVA 1 and 1.5 as Hugging Face stores them: CLIP or SigLIP, two linear layers, a decoder of a text family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core import TransformerConfig
from forge_core.families import Family
from forge_vlm._shared.problems import Problem, invalid
from forge_vlm.adapters import AdapterConfig, MLPConfig
from forge_vlm.config import VLMConfig
from forge_vlm.families import keys
from forge_vlm.modalities import ModalityConfig
from forge_vlm.vision import VisionConfig
from forge_vlm.vision.transformers import front_tokens

_READS = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "tie_word_embeddings"),
    *("projector_hidden_act", "multimodal_projector_bias"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
_TEXT = ("llama", "mistral", "qwen2", "qwen3")
_FEATURES = {"default": "patch", "full": "cls_patch"}


def _from_hf(hf: Mapping[str, Any]) -> VLMConfig:
    keys.check_keys(hf, "llava", _READS)
    decoder = dict(hf["text_config"])
    if hf.get("tie_word_embeddings"):  # either key ties
        decoder["tie_word_embeddings"] = True

    _, text = keys.text_config({"text_config": decoder}, "llava")
    layers = hf.get("vision_feature_layer", -2)
    strategy = hf.get("vision_feature_select_strategy", "default")
    if strategy not in _FEATURES:
        rule = "must be 'default' or 'full'"
        raise invalid(
            "vision_feature_select_strategy", "unknown", strategy, rule, "correct it", where="llava"
        )

    if hf.get("projector_hidden_act", "gelu") != "gelu":
        act, rule = hf["projector_hidden_act"], "must be 'gelu'"
        fix = "use another model"
        raise invalid("projector_hidden_act", "unsupported", act, rule, fix, where="llava")

    vision = keys.vision_from_hf(
        hf,
        select_layer=(layers,) if isinstance(layers, int) else tuple(layers),
        select_feature=_FEATURES[strategy],
    )
    if strategy == "default" and (front := front_tokens(vision.transformers)) != 1:
        kind = vision.transformers["model_type"]
        rule = f"drops one token in front of the patches, and {kind!r} has {front}"
        fix = "use 'full' for a file whose model keeps all"
        raise invalid("vision_feature_select_strategy", "front", strategy, rule, fix, where="llava")

    image = hf.get("image_token_index", hf.get("image_token_id", 32000))
    bias = bool(hf.get("multimodal_projector_bias", True))
    return VLMConfig(
        **vars(text),
        vision=vision,
        adapter=AdapterConfig("mlp", mlp=MLPConfig(bias=bias)),
        modalities={"image": ModalityConfig(first_id=image)},
    )


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, VLMConfig)
    given = (
        ("fusion.name", config.fusion.name, "joint_decoder"),
        ("vision.name", config.vision.name, "transformers"),
        ("adapter.name", config.adapter.name, "mlp"),
        ("adapter.mlp.hidden_dim", config.adapter.mlp.hidden_dim, None),
        ("positions", config.positions, "sequential"),
        ("modalities", sorted(config.modalities), ["image"]),
        *keys.beyond_decoder(config),
    )
    rule, fix = "must name a hidden state in this family", "choose another family"
    layer = Problem("vision.select_layer", "missing", (), rule, fix)
    keys.check_values("llava", given, () if config.vision.select_layer else [layer])
    layers, strategy = config.vision.select_layer, _strategy(config.vision)

    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": keys.family_of(config, _TEXT).config_to_hf(config),
        "vision_config": dict(config.vision.transformers),
        "image_token_index": config.modalities["image"].first_id,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": config.adapter.mlp.bias,
        "vision_feature_layer": layers[0] if len(layers) == 1 else list(layers),
        "vision_feature_select_strategy": strategy,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _strategy(vision: VisionConfig) -> str:
    """The strategy by which transformers takes the same tokens; "default" drops one, whatever it is."""
    if vision.select_feature == "cls_patch":
        return "full"
    front = front_tokens(vision.transformers)
    if front > 1:
        kind = vision.transformers["model_type"]
        rule = f"leaves out {front} tokens of {kind!r}, a class token and registers, and this family one"
        fix = "choose 'cls_patch', or another family"
        raise invalid("vision.select_feature", "front", "patch", rule, fix, where="llava")
    return "default" if front else "full"


def _rows(config: TransformerConfig) -> tuple[keys.Row, ...]:
    assert isinstance(config, VLMConfig)
    text = keys.family_of(config, _TEXT)
    projector = tuple(
        (f"multi_modal_projector.{layer}.{kind}", f"adapter.{layer}.{kind}", ())
        for layer in ("linear_1", "linear_2")
        for kind in (("weight", "bias") if config.adapter.mlp.bias else ("weight",))
    )
    return (
        *keys.text_rows(text, config, "language_model.model.", "language_model.lm_head."),
        *keys.encoder_rows(config, "vision_tower."),
        *projector,
    )


LLAVA = Family("llava", (), _from_hf, _to_hf, _rows)
