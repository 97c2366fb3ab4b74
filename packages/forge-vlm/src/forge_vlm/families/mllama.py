"""Llama 3.2 Vision as Hugging Face stores it: an encoder of tiles, a linear layer, Llama with blocks of cross-attention.

Hugging Face counts these blocks among the layers; here the text's layers have the numbers of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_core import TransformerConfig
from forge_core.families import LLAMA, Family
from forge_vlm._shared.problems import Problem, raise_problems
from forge_vlm.adapters import AdapterConfig
from forge_vlm.config import FusionConfig, VLMConfig
from forge_vlm.families.keys import (
    Row,
    check_keys,
    check_values,
    encoder_rows,
    of_text_config,
    vision_from_hf,
)
from forge_vlm.fusion.config import CrossAttentionConfig
from forge_vlm.modalities import ModalityConfig

_READS = (
    "text_config",
    "vision_config",
    "image_token_index",
    "image_token_id",
    "tie_word_embeddings",
)
#: Rows of the embedding that the head does not have.
_INPUT_ONLY = 8
# What transformers assumes where a file leaves keys out.
_TEXT_DEFAULTS = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "rms_norm_eps": 1e-5},
    **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"max_position_embeddings": 131072, "rope_theta": 500000.0},
}
_CROSS = [3, 8, 13, 18, 23, 28, 33, 38]
_CROSS_NAMES = {
    **{f"cross_attn.{name}.weight": f"mixer.{name}.weight" for name in (
        "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"
    )},
    **{f"mlp.{name}.weight": f"feed_forward.{name}.weight" for name in (
        "gate_proj", "up_proj", "down_proj"
    )},
    "input_layernorm.weight": "mixer_norm.weight",
    "post_attention_layernorm.weight": "feed_forward_norm.weight",
    "cross_attn_attn_gate": "mixer_gate",
    "cross_attn_mlp_gate": "feed_forward_gate",
}  # fmt: skip


def _from_hf(hf: Mapping[str, Any]) -> VLMConfig:
    check_keys(hf, "mllama", _READS)
    text, before = _text(hf["text_config"])
    image = hf.get("image_token_index", hf.get("image_token_id", 128256))
    return VLMConfig(
        **vars(text),
        vision=vision_from_hf(hf),
        adapter=AdapterConfig("linear"),
        fusion=FusionConfig(
            "cross_attention",
            cross_attention=CrossAttentionConfig(layers=before, qk_norm=True, sees="group"),
        ),
        modalities={"image": ModalityConfig(first_id=image)},
        input_only_ids=_INPUT_ONLY,
    )


def _text(keys: Mapping[str, Any]) -> tuple[TransformerConfig, tuple[int, ...]]:
    """The decoder without its blocks of cross-attention, and the text layers that these stand before."""
    given = {**_TEXT_DEFAULTS, **keys}
    cross = given.pop("cross_attention_layers", None)
    cross = _CROSS if cross is None else cross
    kind = given.pop("model_type", "mllama_text_model")
    total = given["num_hidden_layers"]
    before = tuple(layer - i for i, layer in enumerate(sorted(cross)))
    raise_problems("mllama", _text_problems(kind, cross, before, total))
    llama = {**given, "model_type": "llama", "num_hidden_layers": total - len(before)}
    llama["tie_word_embeddings"] = False  # the head has fewer rows, and is never tied
    try:
        return LLAMA.config_from_hf(llama), before
    except ValueError as error:
        raise of_text_config(error, "mllama") from error


def _text_problems(kind: Any, cross: Any, before: tuple[int, ...], total: int) -> Iterator[Problem]:
    if kind != "mllama_text_model":
        rule = "must be 'mllama_text_model'"
        yield Problem("text_config.model_type", "unknown", kind, rule, "correct it")
    if not cross or len(set(before)) < len(before) or before[-1] >= total - len(before):
        rule = f"must each stand before a text layer of its own, of {total} layers in all"
        fix = "use another model"
        yield Problem("text_config.cross_attention_layers", "range", cross, rule, fix)


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, VLMConfig)
    cross = config.fusion.cross_attention

    given = (
        ("fusion.name", config.fusion.name, "cross_attention"),
        ("fusion.cross_attention.qk_norm", cross.qk_norm, True),
        ("fusion.cross_attention.sees", cross.sees, "group"),
        ("vision.name", config.vision.name, "transformers"),
        ("vision.transformers.model_type", _model_type(config), "mllama_vision_model"),
        ("adapter.name", config.adapter.name, "linear"),
        ("modalities", sorted(config.modalities), ["image"]),
        ("input_only_ids", config.input_only_ids, _INPUT_ONLY),
        ("qkv_bias", config.qkv_bias, False),
        ("feed_forward_bias", config.feed_forward_bias, False),
        ("tie_embeddings", config.tie_embeddings, False),
        ("head_dim", config.resolved_head_dim, config.dim // config.num_heads),
    )

    check_values("mllama", given)
    text = LLAMA.config_to_hf(config)
    for key in ("architectures", "attention_bias", "mlp_bias", "head_dim"):
        del text[key]

    layers = _layers(config)
    return {
        "model_type": "mllama",
        "architectures": ["MllamaForConditionalGeneration"],
        "text_config": {
            **text,
            "model_type": "mllama_text_model",
            "pad_token_id": None,  # its default is beyond a small vocabulary
            "num_hidden_layers": len(layers),
            "cross_attention_layers": [i for i, (kind, _) in enumerate(layers) if kind == "cross"],
        },
        "vision_config": dict(config.vision.transformers),
        "image_token_index": config.modalities["image"].first_id,
        "tie_word_embeddings": False,
    }


def _model_type(config: VLMConfig) -> Any:
    return config.vision.transformers.get("model_type")


def _layers(config: VLMConfig) -> list[tuple[str, int]]:
    """In Hugging Face's order: ("cross", i) before ("text", i) where text layer i has a block before it."""
    before = config.fusion.cross_attention.before(config.num_layers)
    found = []
    for layer in range(config.num_layers):
        found += [("cross", layer)] * (layer in before) + [("text", layer)]
    return found


def _rows(config: TransformerConfig) -> tuple[Row, ...]:
    """A row for each tensor: the two sides count layers in their own ways."""
    assert isinstance(config, VLMConfig)
    rows: list[Row] = []
    prefix = "language_model."
    for theirs, ours, ops in LLAMA.rows_of(config):
        if "{i}" not in theirs and not theirs.endswith(".bias"):
            rows.append((prefix + str(theirs), ours, ops))

    for number, (kind, layer) in enumerate(_layers(config)):
        place = f"{prefix}model.layers.{number}."
        if kind == "cross":
            rows += [
                (place + theirs, f"layers.cross_{layer}.{ours}", ())
                for theirs, ours in _CROSS_NAMES.items()
            ]
            continue
        for theirs, ours, ops in LLAMA.rows_of(config):
            if "{i}" in theirs and not theirs.endswith(".bias"):
                name = str(theirs).replace("model.layers.{i}.", place)
                rows.append((name, str(ours).replace("{i}", str(layer)), ops))

    projector = tuple(
        (f"multi_modal_projector.{kind}", f"adapter.{kind}", ()) for kind in ("weight", "bias")
    )
    return (*rows, *encoder_rows(config, "vision_model."), *projector)


MLLAMA = Family("mllama", (), _from_hf, _to_hf, _rows)
