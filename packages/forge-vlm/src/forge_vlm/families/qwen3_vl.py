"""Qwen3-VL as Hugging Face stores it: patches of images of any sizes, DeepStack, Qwen3 with positions of three axes.

Ids of the tokens around an image (`vision_start_token_id`, `vision_end_token_id`) are the tokenizer's: the model reads
none, so they are not kept, and a file without them has those of Qwen's tokenizer (arXiv 2511.21631).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core import TransformerConfig
from forge_core.families import QWEN3, Family
from forge_core.model import MRopeConfig
from forge_vlm._shared.problems import invalid
from forge_vlm.adapters import AdapterConfig
from forge_vlm.config import VLMConfig
from forge_vlm.families import keys
from forge_vlm.modalities import ModalityConfig

_NAME, _VISION = "qwen3_vl", "qwen3_vl_vision"
_IDS = {"image": 151655, "video": 151656}
_READS = (
    *("text_config", "vision_config", "tie_word_embeddings"),
    *(f"{modality}_token_id" for modality in _IDS),
    *("vision_start_token_id", "vision_end_token_id"),
)
_ROPE = ("rope_scaling", "rope_parameters")
_TEXT_DEFAULTS = {"num_key_value_heads": 32, "rope_theta": 500000.0}


def _from_hf(hf: Mapping[str, Any]) -> VLMConfig:
    keys.check_keys(hf, _NAME, _READS)
    text = {**_TEXT_DEFAULTS, **hf["text_config"], "model_type": "qwen3"}
    # said outside the decoder's table
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings", False))
    _, decoder = keys.text_config({"text_config": text | _plain_rope(text)}, _NAME)
    given = hf["vision_config"].get("model_type", _VISION)
    # files of the first release name the encoder as the model
    vision = {**hf["vision_config"], "model_type": _VISION if given == _NAME else given}
    ids = {modality: hf.get(f"{modality}_token_id", id) for modality, id in _IDS.items()}
    return VLMConfig(
        **vars(decoder),
        vision=keys.vision_from_hf({"vision_config": vision}),
        adapter=AdapterConfig("none"),
        modalities={modality: ModalityConfig(first_id=id) for modality, id in ids.items()},
        mrope=_mrope(text),
        positions="mrope",
    )


def _plain_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary tables without the keys of three axes."""
    tables = {where: text[where] for where in _ROPE if isinstance(text.get(where), Mapping)}
    return {
        where: {key: value for key, value in table.items() if not key.startswith("mrope_")}
        for where, table in tables.items()
    }


def _mrope(text: Mapping[str, Any]) -> MRopeConfig:
    """Of the first table that is not empty, which transformers reads; ValueError for another that differs."""
    found = [
        (table.get("mrope_interleaved", True), tuple(table.get("mrope_section") or (24, 20, 20)))
        for where in _ROPE
        if (table := text.get(where))
    ] or [(True, (24, 20, 20))]
    interleaved, sections = found[0]
    if found[-1] != found[0]:
        key, rule = "text_config.rope_parameters", f"differ in mrope_section from {found[0]}"
        fix = "give rope_scaling the same, or remove one of the tables"
        raise invalid(key, "conflict", found[-1], rule, fix, where=_NAME)
    if interleaved is not True:
        key, rule, fix = "text_config.mrope_interleaved", "must be true", "use another model"
        raise invalid(key, "unsupported", interleaved, rule, fix, where=_NAME)
    return MRopeConfig(sections, "interleaved")


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, VLMConfig)
    vision, mrope = config.vision, config.mrope
    given = (
        ("fusion.name", config.fusion.name, "joint_decoder"),
        ("vision.name", vision.name, "transformers"),
        ("vision.transformers.model_type", vision.transformers.get("model_type"), _VISION),
        ("adapter.name", config.adapter.name, "none"),
        ("positions", config.positions, "mrope"),
        ("mrope.layout", mrope and mrope.layout, "interleaved"),
        ("modalities", sorted(config.modalities), sorted(_IDS)),
        ("layer_pattern", config.layer_pattern, ()),
        ("attention.window", config.attention.window, None),
        *keys.beyond_decoder(config),
    )

    keys.check_values(_NAME, given)
    assert mrope is not None
    return {
        "model_type": _NAME,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": _text_to_hf(config, mrope),
        "vision_config": dict(vision.transformers),
        **{f"{modality}_token_id": config.modalities[modality].first_id for modality in _IDS},
        "tie_word_embeddings": config.tie_embeddings,
    }


def _text_to_hf(config: VLMConfig, mrope: MRopeConfig) -> dict[str, Any]:
    text = QWEN3.config_to_hf(config)
    axes = {"mrope_section": list(mrope.sections), "mrope_interleaved": True}
    for where in _ROPE:
        text[where] = {**(text[where] or {"rope_type": "default"}), **axes}
    for key in ("architectures", "use_sliding_window"):
        del text[key]
    return {**text, "model_type": "qwen3_vl_text"}


def _rows(config: TransformerConfig) -> tuple[keys.Row, ...]:
    assert isinstance(config, VLMConfig)
    return (
        *keys.text_rows(QWEN3, config, "model.language_model.", "lm_head."),
        *keys.encoder_rows(config, "model.visual."),
    )


QWEN3_VL = Family(_NAME, (), _from_hf, _to_hf, _rows)
