"""Configuration keys, tensor names and module names that vision-language models of Hugging Face share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from forge_core import TransformerConfig
from forge_core.families import FAMILIES, Family, find_family
from forge_vlm._shared.hf_keys import HARMLESS, TRAINING
from forge_vlm._shared.problems import Problem, ProblemError, invalid, problems_of, raise_problems
from forge_vlm.config import VLMConfig
from forge_vlm.vision import VisionConfig, build_encoder

__all__ = ["MODULES", "module_name"]

Row = tuple[str, str | tuple[str, ...], tuple[tuple[Any, ...], ...]]
# Further keys of no meaning for the forward pass.
_UNREAD = HARMLESS | {"ignore_index", "image_seq_length", "model_type", "vocab_size"}
#: Keys of vision configs that change nothing in evaluation. Rates of dropout stay: transformers' encoder has them.
_VISION_UNREAD = _UNREAD | {"initializer_factor", "initializer_range", "projection_dim"}
# What transformers assumes where an older file leaves keys out.
_TEXT_DEFAULTS = {
    "llama": {
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048},
    }
}


def check_keys(hf: Mapping[str, Any], model_type: str, reads: tuple[str, ...]) -> None:
    """ValueError with a line for each key that is not known: it may change what the model computes."""
    rule, fix = "is unknown and may change what the model computes", "remove it if it does not"
    unknown = [
        Problem(key, "unknown_key", value, rule, fix)
        for key, value in hf.items()
        if key not in _UNREAD | TRAINING and key not in reads and value is not None
    ]
    missing = [
        Problem(key, "type", ..., "must be a table", "give a complete config.json")
        for key in ("text_config", "vision_config")
        if not isinstance(hf.get(key), Mapping)
    ]
    raise_problems(model_type, missing + unknown)


def check_values(
    family: str, given: Iterable[tuple[str, Any, Any]], more: Sequence[Problem] = ()
) -> None:
    """ValueError with `more` problems, and one for each (key, value, wanted) whose value is not the only one that the
    family can hold."""
    fix = "choose another family"
    own = [
        Problem(key, "family", value, f"must be {wanted!r} in this family", fix)
        for key, value, wanted in given
        if value != wanted
    ]
    raise_problems(family, [*own, *more])


def of_text_config(error: ValueError, model_type: str) -> ProblemError:
    """The error of a decoder's keys, with the problems below text_config."""
    return ProblemError([p.under("text_config") for p in problems_of(error)], model_type)


def text_config(hf: Mapping[str, Any], model_type: str) -> tuple[Family, TransformerConfig]:
    """The decoder of `text_config`, and its family."""
    keys = dict(hf["text_config"])
    given = {**_TEXT_DEFAULTS.get(str(keys.get("model_type")), {}), **keys}
    try:
        family = find_family(given)
        return family, family.config_from_hf(given)
    except ValueError as error:
        raise of_text_config(error, model_type) from error


def vision_from_hf(hf: Mapping[str, Any], **options: Any) -> VisionConfig:
    """An encoder of transformers from `vision_config`."""
    keys = {k: v for k, v in hf["vision_config"].items() if k not in _VISION_UNREAD}
    model_type = hf["vision_config"].get("model_type")
    return VisionConfig("transformers", transformers={"model_type": model_type, **keys}, **options)


def beyond_decoder(config: VLMConfig) -> tuple[tuple[str, Any, Any], ...]:
    """(key, value, the only one that can be written) of what no family with a joint decoder has a key for."""
    return (
        ("bidirectional", config.bidirectional, "none"),
        ("input_only_ids", config.input_only_ids, 0),
    )


def text_rows(family: Family, config: VLMConfig, prefix: str, head: str) -> tuple[Row, ...]:
    """Rows of the decoder's tensors: those of its family, `model.` as `prefix` and the head as `head`."""

    def named(pattern: str) -> str:
        if pattern.startswith("lm_head."):
            return head + pattern.removeprefix("lm_head.")
        return prefix + pattern.removeprefix("model.")

    return tuple(
        (named(theirs) if isinstance(theirs, str) else tuple(map(named, theirs)), ours, ops)
        for theirs, ours, ops in family.rows_of(config)
    )


def encoder_rows(config: VLMConfig, prefix: str) -> tuple[Row, ...]:
    """Rows of the encoder's tensors, which have the names of transformers; builds it on the meta device."""
    with torch.device("meta"):
        names = build_encoder(config.vision).model.state_dict()
    return tuple((prefix + name, f"vision.model.{name}", ()) for name in names)


def family_of(config: VLMConfig, names: tuple[str, ...]) -> Family:
    """The family of text models, of `names`, that holds the decoder; ValueError with what keeps it from the first."""
    errors = []
    for name in names:
        try:
            FAMILIES[name].config_to_hf(config)
        except ValueError as error:
            errors.append(error)
        else:
            return FAMILIES[name]
    raise errors[0]


#: Prefixes in files, and what they are in the model; of other families it was not looked at.
MODULES: dict[str, dict[str, str]] = {
    "llava": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "qwen3_vl": {},
}


def module_name(family: str, tensor: str) -> str:
    """What the model of a family in `MODULES` calls a tensor that its files call `tensor`.

    Usage: `module_name("llava", "vision_tower.post_layernorm.bias")`, "model.vision_tower.post_layernorm.bias".
    ValueError for another family.
    """
    if family not in MODULES:
        rule = f"must be one of {', '.join(MODULES)}, whose modules peft is known to find"
        raise invalid("", "adapter", family, rule, "export the merged model")
    for prefix, there in MODULES[family].items():
        if tensor.startswith(prefix):
            return there + tensor.removeprefix(prefix)
    return tensor
