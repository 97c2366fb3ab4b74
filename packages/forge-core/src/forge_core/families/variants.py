"""Dense decoders with one thing of their own: OLMo 2 (norms behind), Granite (factors), SmolLM3 (NoPE layers)."""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import invalid
from forge_core.families.dense import NORMS, OUTSIDE_LAYERS, QK_NORMS, Family, layer_rows, sublayers
from forge_core.families.keys import read_common, write_common
from forge_core.families.layers import (
    FULL,
    LOCAL,
    SLIDING,
    kinds_of,
    names_of,
    needed_window,
    pattern_options,
    windows_of,
)
from forge_core.model.config import TransformerConfig
from forge_core.model.layer_types import GLOBAL, LayerType
from forge_core.model.spec import AttentionSpec

_OLMO2: dict[str, Any] = {"block": "post_norm", "qk_norm": True, "qk_norm_over": "all_heads"}


def _olmo2_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    bias = bool(hf.get("attention_bias", False))
    given = {"rms_norm_eps": 1e-5, **hf}
    return read_common(given, "olmo2", ("attention_bias",), qkv_bias=bias, o_bias=bias, **_OLMO2)


def _olmo2_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {**_OLMO2, "o_bias": config.qkv_bias, "feed_forward_bias": False}
    hf = write_common(config, "olmo2", "Olmo2ForCausalLM", fixed)
    return {**hf, "attention_bias": config.qkv_bias}


OLMO2 = Family(
    "olmo2",
    OUTSIDE_LAYERS
    + layer_rows("post_attention_layernorm", "mixer_post_norm")
    + layer_rows("post_feedforward_layernorm", "feed_forward_post_norm")
    + QK_NORMS
    + sublayers(o_bias=True, feed_forward_bias=False),
    _olmo2_from_hf,
    _olmo2_to_hf,
)

_MULTIPLIERS = (
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "logits_scaling",
)


def _inverse(value: float) -> float:
    """1 / value to 15 digits, so that the inverse of an inverse is what it was."""
    return float(f"{1.0 / value:.15g}")


def _granite_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    def factors() -> dict[str, Any]:
        embedding, residual, scores, logits = (
            1.0 if hf.get(key) is None else float(hf[key]) for key in _MULTIPLIERS
        )
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        return {
            "embedding_scale": embedding,
            "residual_scale": residual,
            "attention": AttentionSpec(scale=None if scores == head_dim**-0.5 else scores),
            "logits_scale": 1.0 / logits,
        }

    bias = bool(hf.get("attention_bias", False))
    return read_common(
        hf,
        "granite",
        ("attention_bias", "mlp_bias", *_MULTIPLIERS),
        after=factors,
        qkv_bias=bias,
        o_bias=bias,
        feed_forward_bias=bool(hf.get("mlp_bias", False)),
    )


def _granite_to_hf(config: TransformerConfig) -> dict[str, Any]:
    own = ("embedding_scale", "residual_scale", "logits_scale")
    fixed = {"qk_norm": False, "o_bias": config.qkv_bias, **{k: getattr(config, k) for k in own}}
    hf = write_common(config, "granite", "GraniteForCausalLM", fixed, ("scale",))
    scale = config.attention.scale
    return {
        **hf,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.feed_forward_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.resolved_head_dim**-0.5 if scale is None else scale,
        "logits_scaling": _inverse(config.logits_scale),
    }


GRANITE = Family(
    "granite",
    OUTSIDE_LAYERS + NORMS + sublayers(o_bias=True, feed_forward_bias=True),
    _granite_from_hf,
    _granite_to_hf,
)


def _smollm3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    def layers() -> dict[str, Any]:
        count, window = hf["num_hidden_layers"], hf.get("sliding_window")
        window = window if hf.get("use_sliding_window") else None
        every = hf.get("no_rope_layer_interval") or 4
        turns = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
        if len(turns) < count:
            rule = f"has {len(turns)} entries and must have one for each of {count} layers"
            key = "no_rope_layers"
            raise invalid(key, "length", turns, rule, "correct it", where="smollm3")
        slides = [SLIDING if window is not None and not turn else FULL for turn in turns[:count]]
        words = {(True, GLOBAL): GLOBAL, (False, GLOBAL): "nope"}
        words |= {(True, LOCAL): LOCAL, (False, LOCAL): "nope_local"}
        kinds = names_of(hf, "smollm3", slides)
        window = needed_window(hf, "smollm3", kinds, window)
        types = {"nope": LayerType(rope=False)}
        if window is not None:
            types[LOCAL] = LayerType(window=window)
            types["nope_local"] = LayerType(window=window, rope=False)
        return pattern_options([words[bool(t), k] for t, k in zip(turns, kinds)], types)

    bias = bool(hf.get("attention_bias", False))
    defaults = {"rope_theta": 2e6, "tie_word_embeddings": True}
    return read_common(
        {**defaults, **hf},
        "smollm3",
        (
            "attention_bias",
            "mlp_bias",
            "no_rope_layers",
            "no_rope_layer_interval",
            "sliding_window",
        ),
        after=layers,
        sliding=True,
        qkv_bias=bias,
        o_bias=bias,
        feed_forward_bias=bool(hf.get("mlp_bias", False)),
    )


def _smollm3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    kinds = kinds_of(config)
    windows = windows_of(kinds)
    turning = {(kind.rope_theta, kind.scaled) for kind in kinds if kind.rope}
    if len(windows) > 1 or not turning <= {(config.rope_theta, True)}:
        here = f"and here are {sorted(set(map(str, kinds)))}"
        rule, fix = f"may differ only in one window and in rope, {here}", "choose another family"
        raise invalid("layer_types", "family", ..., rule, fix, where="smollm3")
    fixed = {
        "qk_norm": False,
        "o_bias": config.qkv_bias,
        "layer_pattern": config.layer_pattern,
        "partial_rotary_factor": config.partial_rotary_factor if not turning else 1.0,
    }
    hf = write_common(config, "smollm3", "SmolLM3ForCausalLM", fixed, ("window",))
    return {
        **hf,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.feed_forward_bias,
        "no_rope_layers": [int(kind.rope) for kind in kinds],
        "layer_types": [FULL if kind.window is None else SLIDING for kind in kinds],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows) if windows else None,
        # left out it is 128004, which transformers looks up in the embedding
        **({} if config.vocab_size > 128004 else {"pad_token_id": None}),
    }


SMOLLM3 = Family(
    "smollm3",
    OUTSIDE_LAYERS + NORMS + sublayers(o_bias=True, feed_forward_bias=True),
    _smollm3_from_hf,
    _smollm3_to_hf,
)
