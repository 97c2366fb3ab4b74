"""Dense decoders: Llama 3, Mistral, Qwen2/2.5, Qwen3, Phi-3 and 4, OLMo 2, Granite and SmolLM3."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from forge_core._config import is_size
from forge_core._shared.problems import invalid
from forge_core.families.family import (
    NORMS,
    OUTSIDE_LAYERS,
    QK_NORMS,
    Family,
    Row,
    layer_rows,
    sublayers,
)
from forge_core.families.keys import Spelling
from forge_core.families.layers import (
    FULL,
    LOCAL,
    SLIDING,
    layer_specs,
    local_options,
    names_of,
    needed_window,
    pattern_options,
    sliding_to_hf,
    windows_of,
)
from forge_core.model.attention_ops import AttentionSpec
from forge_core.model.config import GLOBAL, LayerType, TransformerConfig

_BIAS = {"attention_bias": ("qkv_bias", "o_bias")}
_BIASES = {**_BIAS, "mlp_bias": ("feed_forward_bias",)}
_BASE = OUTSIDE_LAYERS + NORMS
_WITH_BIASES = _BASE + sublayers(o_bias=True, feed_forward_bias=True)
_PLAIN = _BASE + sublayers(o_bias=False, feed_forward_bias=False)


def _window_spec(window: Any) -> AttentionSpec:
    """The window of all layers. null, or a size beyond any sequence, is full attention; `Spelling.read` reports others."""
    return AttentionSpec(window=window if is_size(window, 2**31) else None)


def _pad_token_id(config: TransformerConfig, default: int) -> dict[str, Any]:
    """`pad_token_id` null for small vocabularies: transformers looks up its default in the embedding."""
    return {} if config.vocab_size > default else {"pad_token_id": None}


# Llama

_LLAMA = Spelling("llama", "LlamaForCausalLM", switches=_BIASES)
LLAMA = Family("llama", _WITH_BIASES, _LLAMA.read, _LLAMA.write)


# Mistral: one window for all layers

_MISTRAL = Spelling(
    "mistral",
    "MistralForCausalLM",
    defaults={"num_key_value_heads": 8},
    reads=("sliding_window",),
)


def _mistral_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    window = hf.get("sliding_window", 4096)  # transformers' default
    if hf.get("layer_types"):  # AutoConfig reads such a file as Ministral: full layers have none
        window = None
    return _MISTRAL.read(hf, attention=_window_spec(window))


def _mistral_to_hf(config: TransformerConfig) -> dict[str, Any]:
    hf = _MISTRAL.write(config, ("window",))
    return {**hf, "sliding_window": config.attention.window}


MISTRAL = Family("mistral", _PLAIN, _mistral_from_hf, _mistral_to_hf)


# Qwen: a window only if `use_sliding_window` is true, in the layers from `max_window_layers` on

_QWEN_READS = ("sliding_window", "max_window_layers")
_QWEN2 = Spelling(
    "qwen2",
    "Qwen2ForCausalLM",
    fixed={"qkv_bias": True},
    defaults={"num_key_value_heads": 32},
    reads=_QWEN_READS,
)
_QWEN3 = Spelling(
    "qwen3",
    "Qwen3ForCausalLM",
    fixed={"qk_norm": True},
    switches=_BIAS,
    # head_dim is 128 at every width, not dim / num_heads
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    reads=_QWEN_READS,
)


def _qwen_from_hf(spelling: Spelling, hf: Mapping[str, Any]) -> TransformerConfig:
    """Read Qwen2 or Qwen3, with the windows of its layers."""
    model_type = spelling.model_type

    def windows() -> dict[str, Any]:
        window, first = hf.get("sliding_window", 4096), hf.get("max_window_layers", 28)
        if not hf.get("use_sliding_window"):
            return {}
        if not isinstance(first, int):
            key, rule = "max_window_layers", "must be a whole number"
            raise invalid(key, "type", first, rule, "correct it", where=model_type)
        layers = range(hf["num_hidden_layers"])
        default = [FULL if window is None or i < first else SLIDING for i in layers]
        names = names_of(hf, model_type, default)
        return local_options(hf, model_type, names, window)

    sliding = hf.get("use_sliding_window") is True
    return spelling._replace(sliding=sliding).read(hf, windows)


def _qwen_to_hf(spelling: Spelling, config: TransformerConfig) -> dict[str, Any]:
    """Write Qwen2 or Qwen3, with the windows of its layers."""
    windows = sliding_to_hf(config, spelling.model_type)
    hf = spelling.write(config, ("window",), layer_pattern=config.layer_pattern)
    if windows["sliding_window"] is None:
        return {**hf, "use_sliding_window": False}
    first = windows["layer_types"].index(SLIDING)
    return {**hf, **windows, "use_sliding_window": True, "max_window_layers": first}


QWEN2 = Family("qwen2", _PLAIN, partial(_qwen_from_hf, _QWEN2), partial(_qwen_to_hf, _QWEN2))
QWEN3 = Family(
    "qwen3",
    _BASE + QK_NORMS + sublayers(o_bias=True, feed_forward_bias=False),
    partial(_qwen_from_hf, _QWEN3),
    partial(_qwen_to_hf, _QWEN3),
)


# Phi-3 and 4: queries, keys and values in one tensor, and gate and up in another

_PHI3 = Spelling(
    "phi3",
    "Phi3ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    reads=("sliding_window", "original_max_position_embeddings"),
    partial_rotary=True,
)


def _phi3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    config = _PHI3.read(hf, attention=_window_spec(hf.get("sliding_window")))
    if config.rope_scaling is not None:
        name = config.rope_scaling.name
        rule = "is not supported, as transformers reads 'longrope' or nothing there"
        raise invalid("rope_type", "family", name, rule, "use 'default'", where="phi3")
    return config


def _phi3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    factor = config.partial_rotary_factor
    hf = _PHI3.write(config, ("window",), partial_rotary_factor=factor, rope_scaling=None)
    hf["rope_parameters"]["partial_rotary_factor"] = factor
    return {
        **hf,
        "partial_rotary_factor": factor,
        "original_max_position_embeddings": config.max_seq_len,
        "sliding_window": config.attention.window,
        **_pad_token_id(config, 32000),
    }


def _phi3_rows(config: TransformerConfig) -> tuple[Row, ...]:
    """Rows that split the fused tensors by the heads of the config."""
    heads, kv_heads = config.num_heads, config.resolved_num_kv_heads
    sizes = tuple(count * config.resolved_head_dim for count in (heads, kv_heads, kv_heads))
    ours = {
        "self_attn.qkv_proj": ([f"mixer.{n}_proj" for n in "qkv"], sizes),
        "mlp.gate_up_proj": (["feed_forward.gate_proj", "feed_forward.up_proj"], 2),
    }
    return tuple(
        (
            f"model.layers.{{i}}.{theirs}.weight",
            tuple(f"layers.{{i}}.{name}.weight" for name in names),
            (("split", 0, chunks),),
        )
        for theirs, (names, chunks) in ours.items()
    )


PHI3 = Family(
    "phi3",
    _BASE
    + layer_rows("self_attn.o_proj", "mixer.o_proj")
    + layer_rows("mlp.down_proj", "feed_forward.down_proj"),
    _phi3_from_hf,
    _phi3_to_hf,
    _phi3_rows,
)


# OLMo 2: norms after the sublayers

_OLMO2 = Spelling(
    "olmo2",
    "Olmo2ForCausalLM",
    fixed={"block": "post_norm", "qk_norm": True, "qk_norm_over": "all_heads"},
    switches=_BIAS,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO2 = Family(
    "olmo2",
    OUTSIDE_LAYERS
    + layer_rows("post_attention_layernorm", "mixer_post_norm")
    + layer_rows("post_feedforward_layernorm", "feed_forward_post_norm")
    + QK_NORMS
    + sublayers(o_bias=True, feed_forward_bias=False),
    _OLMO2.read,
    _OLMO2.write,
)


# Granite: factors of embedding, residual stream, scores and logits

_MULTIPLIERS = (
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "logits_scaling",
)
_GRANITE = Spelling("granite", "GraniteForCausalLM", switches=_BIASES, reads=_MULTIPLIERS)


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

    return _GRANITE.read(hf, factors)


def _granite_to_hf(config: TransformerConfig) -> dict[str, Any]:
    own = ("embedding_scale", "residual_scale", "logits_scale")
    hf = _GRANITE.write(config, ("scale",), **{name: getattr(config, name) for name in own})
    scale = config.attention.scale
    return {
        **hf,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.resolved_head_dim**-0.5 if scale is None else scale,
        "logits_scaling": _inverse(config.logits_scale),
    }


GRANITE = Family("granite", _WITH_BIASES, _granite_from_hf, _granite_to_hf)


# SmolLM3: layers without rotary embedding (NoPE)

_SMOLLM3 = Spelling(
    "smollm3",
    "SmolLM3ForCausalLM",
    switches=_BIASES,
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4},
    reads=("no_rope_layers", "no_rope_layer_interval", "sliding_window"),
    sliding=True,
)


def _smollm3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    def layers() -> dict[str, Any]:
        count, window = hf["num_hidden_layers"], hf.get("sliding_window")
        window = window if hf.get("use_sliding_window") else None
        every = hf.get("no_rope_layer_interval") or 4
        rotated = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
        if len(rotated) < count:
            rule = f"has {len(rotated)} entries and must have one for each of {count} layers"
            key = "no_rope_layers"
            raise invalid(key, "length", rotated, rule, "correct it", where="smollm3")

        # transformers gives a window to the layers without rotary embedding
        slides = [SLIDING if window is not None and not r else FULL for r in rotated[:count]]
        names = names_of(hf, "smollm3", slides)
        window = needed_window(hf, "smollm3", names, window)
        types = {"nope": LayerType(rope=False)}
        if window is not None:
            types[LOCAL] = LayerType(window=window)
            types["nope_local"] = LayerType(window=window, rope=False)
        without_rope = {GLOBAL: "nope", LOCAL: "nope_local"}
        pattern = [name if r else without_rope[name] for r, name in zip(rotated, names)]
        return pattern_options(pattern, types)

    return _SMOLLM3.read(hf, layers)


def _smollm3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    specs = layer_specs(config)
    windows = windows_of(specs)
    rotated = {(spec.rope_theta, spec.scaled) for spec in specs if spec.rope}
    if len(windows) > 1 or not rotated <= {(config.rope_theta, True)}:
        here = f"and here are {sorted(set(map(str, specs)))}"
        rule, fix = f"may differ only in one window and in rope, {here}", "choose another family"
        raise invalid("layer_types", "family", ..., rule, fix, where="smollm3")

    # without a rotated layer the factor is in no layer's type
    factor = config.partial_rotary_factor if not rotated else 1.0
    hf = _SMOLLM3.write(
        config, ("window",), layer_pattern=config.layer_pattern, partial_rotary_factor=factor
    )
    return {
        **hf,
        "no_rope_layers": [int(spec.rope) for spec in specs],
        "layer_types": [FULL if spec.window is None else SLIDING for spec in specs],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows) if windows else None,
        **_pad_token_id(config, 128004),
    }


SMOLLM3 = Family("smollm3", _WITH_BIASES, _smollm3_from_hf, _smollm3_to_hf)
