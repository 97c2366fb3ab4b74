"""The decoder of gpt-oss: attention with sinks and biases, of a window in every second layer.

Keys and rows of its experts are another package's.
"""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import invalid
from forge_core.families.dense import NORMS, OUTSIDE_LAYERS, Family, layer_rows
from forge_core.families.keys import read_common, write_common
from forge_core.families.layers import (
    FULL,
    SLIDING,
    local_options,
    names_of,
    sliding_to_hf,
)
from forge_core.families.mixtures import EXPERT_KEYS
from forge_core.model.config import TransformerConfig
from forge_core.model.spec import AttentionSpec

_NAME = "gpt_oss"
_ROWS = tuple(
    row
    for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    for row in layer_rows(f"self_attn.{name}", f"mixer.{name}", bias=True)
)
_SINKS = (("model.layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks", ()),)
# transformers' own, where a file has none
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_READS = (
    *("attention_bias", "sliding_window", "experts_per_token", "initial_context_length"),
    *("swiglu_alpha", "swiglu_limit", *EXPERT_KEYS),
)


def _from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    if (quantized := hf.get("quantization_config")) is not None:
        rule = "is not supported: experts in 4 bits (mxfp4) are not read"
        fix = "load the model with Mxfp4Config(dequantize=True) of transformers, save it, and import that"
        raise invalid("quantization_config", "unsupported", quantized, rule, fix, where=_NAME)
    given = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
    if "rope_parameters" not in given and not given.get("rope_scaling"):
        given["rope_scaling"] = _YARN

    def layers() -> dict[str, Any]:
        count = given["num_hidden_layers"]
        names = names_of(given, _NAME, [(SLIDING, FULL)[i % 2] for i in range(count)])
        window = hf.get("sliding_window", _DEFAULTS["sliding_window"])
        return local_options(hf, _NAME, names, window)

    return read_common(
        given,
        _NAME,
        _READS,
        after=layers,
        sliding=True,
        attention=AttentionSpec(sinks=True),
        qkv_bias=given["attention_bias"],
        o_bias=given["attention_bias"],
    )


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {
        **{"qk_norm": False, "o_bias": config.qkv_bias, "feed_forward_bias": False},
        "layer_pattern": config.layer_pattern,
    }
    hf = write_common(config, _NAME, "GptOssForCausalLM", fixed, ("sinks", "window"))
    if not config.attention.sinks:
        rule, fix = "must be true in this family", "set it, or choose another"
        raise invalid("attention.sinks", "family", False, rule, fix, where=_NAME)
    layers = sliding_to_hf(config, _NAME)
    return {**hf, **layers, "attention_bias": config.qkv_bias}


GPT_OSS = Family(_NAME, OUTSIDE_LAYERS + NORMS + _ROWS + _SINKS, _from_hf, _to_hf)
