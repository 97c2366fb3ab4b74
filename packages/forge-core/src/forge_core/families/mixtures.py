"""Decoders of mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4-MoE, DeepSeek-V3 and gpt-oss.

Here are their attention, norms, embeddings and dense feed-forwards. Rows and keys of the experts are forge-moe's. A
`config.json` has both; here the keys of experts are skipped by name (`_EXPERT_KEYS`), and every other unknown key is an
error as in the dense families.
"""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.families.family import (
    NORMS,
    OUTSIDE_LAYERS,
    QK_NORMS,
    Family,
    attention_rows,
    feed_forward_rows,
    layer_rows,
    sublayers,
)
from forge_core.families.keys import Spelling, given_values
from forge_core.families.layers import FULL, SLIDING, local_options, names_of, sliding_to_hf
from forge_core.model.attention_ops import AttentionSpec
from forge_core.model.config import TransformerConfig
from forge_core.model.mla import MLAConfig

# Keys of experts: forge-moe reads each, or raises an error.
_EXPERT_KEYS = tuple(
    [
        "aux_loss_alpha",
        "decoder_sparse_step",
        "ep_size",
        "first_k_dense_replace",
        "mlp_only_layers",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
        "num_nextn_predict_layers",
        "output_router_logits",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "scoring_func",
        "seq_aux",
        "shared_expert_intermediate_size",
        "topk_group",
        "topk_method",
    ]
)
_BIAS = {"attention_bias": ("qkv_bias", "o_bias")}
_BASE = OUTSIDE_LAYERS + NORMS
_PLAIN = _BASE + sublayers(o_bias=False, feed_forward_bias=False)
_NORMED = _BASE + QK_NORMS + sublayers(o_bias=True, feed_forward_bias=False)

_MIXTRAL = Spelling(
    "mixtral",
    "MixtralForCausalLM",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
    reads=_EXPERT_KEYS,
)
MIXTRAL = Family("mixtral", _PLAIN, _MIXTRAL.read, _MIXTRAL.write)

_OLMOE = Spelling(
    "olmoe",
    "OlmoeForCausalLM",
    fixed={"qk_norm": True, "qk_norm_over": "all_heads"},
    switches=_BIAS,
    defaults={"rms_norm_eps": 1e-5},
    reads=_EXPERT_KEYS,
)
OLMOE = Family("olmoe", _NORMED, _OLMOE.read, _OLMOE.write)


# Qwen: with the window off, a file has 0, null or a size that transformers does not read

_QWEN2_MOE = Spelling(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    switches={"qkv_bias": ("qkv_bias",)},
    defaults={"qkv_bias": True, "num_key_value_heads": 16},
    reads=_EXPERT_KEYS,
)
_QWEN3_MOE = Spelling(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    fixed={"qk_norm": True},
    switches=_BIAS,
    defaults={"num_key_value_heads": 4},
    reads=_EXPERT_KEYS,
)


def _qwen_family(rows: tuple[Any, ...], spelling: Spelling) -> Family:
    """A Qwen mixture of experts, which has no window."""

    def from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
        off = () if hf.get("use_sliding_window") else ("sliding_window", "max_window_layers")
        return spelling.read({key: value for key, value in hf.items() if key not in off})

    def to_hf(config: TransformerConfig) -> dict[str, Any]:
        return {**spelling.write(config), "use_sliding_window": False}

    return Family(spelling.model_type, rows, from_hf, to_hf)


QWEN2_MOE = _qwen_family(_PLAIN, _QWEN2_MOE)
QWEN3_MOE = _qwen_family(_NORMED, _QWEN3_MOE)


# GLM-4: rotary embedding of a part of each head

_GLM4_MOE = Spelling(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    switches={"attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_norm",)},
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    reads=_EXPERT_KEYS,
    partial_rotary=True,
)


def _glm4_moe_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    # transformers reads null as 1, and takes its default only where the key is left out
    factor = hf.get("partial_rotary_factor", 0.5)
    return _GLM4_MOE.read({**given_values(hf), "partial_rotary_factor": factor})


def _glm4_moe_to_hf(config: TransformerConfig) -> dict[str, Any]:
    factor = config.partial_rotary_factor
    hf = _GLM4_MOE.write(config, partial_rotary_factor=factor)
    hf["rope_parameters"]["partial_rotary_factor"] = factor
    return {**hf, "partial_rotary_factor": factor}


GLM4_MOE = Family("glm4_moe", _PLAIN + QK_NORMS, _glm4_moe_from_hf, _glm4_moe_to_hf)


# DeepSeek-V3: latent attention

_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# The names of Hugging Face that differ from Forge's.
_RENAMED = {
    "q_a_layernorm": "q_a_norm",
    "kv_a_proj_with_mqa": "kv_a_proj",
    "kv_a_layernorm": "kv_a_norm",
}
_BIASED = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
_UNBIASED = ("q_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")
_LATENT_ROWS = tuple(
    row
    for name in (*_BIASED, *_UNBIASED)
    for row in layer_rows(
        f"self_attn.{name}", f"mixer.{_RENAMED.get(name, name)}", bias=name in _BIASED
    )
)
_DEEPSEEK_V3 = Spelling(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fixed={"mixer": "mla"},
    switches=_BIAS,
    defaults={"num_key_value_heads": 128},
    reads=("qk_head_dim", "rope_interleave", *_WIDTHS, *_EXPERT_KEYS),
)


def _deepseek_v3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    rule, fix = "is missing", "write its width, or null"
    lost = (key for key in _WIDTHS if key not in hf)
    raise_problems("deepseek_v3", (Problem(key, "missing", ..., rule, fix) for key in lost))
    config = _DEEPSEEK_V3.read(
        {key: value for key, value in hf.items() if key != "head_dim"},
        mla=MLAConfig(
            **{key: hf[key] for key in _WIDTHS},
            rope_interleave=bool(hf.get("rope_interleave", True)),  # null is false there
        ),
    )

    # widths that follow from others
    widths = config.resolved_mla
    for key, width, rule in (
        ("qk_head_dim", widths.qk_head_dim, "the sum of qk_nope_head_dim and qk_rope_head_dim"),
        ("head_dim", widths.qk_rope_head_dim, "qk_rope_head_dim"),
    ):
        if (given := hf.get(key)) not in (None, width):
            rule = f"must be {width}, {rule}"
            raise invalid(key, "sum", given, rule, "correct it", where="deepseek_v3")
    return config


def _deepseek_v3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    widths = config.resolved_mla
    return {
        **_DEEPSEEK_V3.write(config),
        **{key: getattr(widths, key) for key in _WIDTHS},
        "head_dim": widths.qk_rope_head_dim,
        "rope_interleave": widths.rope_interleave,
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _BASE + _LATENT_ROWS + feed_forward_rows(),
    _deepseek_v3_from_hf,
    _deepseek_v3_to_hf,
)


# gpt-oss: attention with sinks and biases, of a window in every second layer

_GPT_OSS = Spelling(
    "gpt_oss",
    "GptOssForCausalLM",
    switches=_BIAS,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "attention_bias": True,
    },
    reads=(
        *("sliding_window", "experts_per_token", "initial_context_length"),
        *("swiglu_alpha", "swiglu_limit", *_EXPERT_KEYS),
    ),
    sliding=True,
)
# transformers' own, if a file has no rotary table
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    if (quantized := hf.get("quantization_config")) is not None:
        rule = "is not supported: experts in 4 bits (mxfp4) are not read"
        fix = "load the model with Mxfp4Config(dequantize=True) of transformers, save it, and import that"
        raise invalid("quantization_config", "unsupported", quantized, rule, fix, where="gpt_oss")
    given = given_values(hf)
    if "rope_parameters" not in given and not given.get("rope_scaling"):
        given["rope_scaling"] = _GPT_OSS_YARN

    def layers() -> dict[str, Any]:
        count = given["num_hidden_layers"]
        names = names_of(given, "gpt_oss", [(SLIDING, FULL)[i % 2] for i in range(count)])
        window = hf.get("sliding_window", _GPT_OSS.defaults["sliding_window"])
        return local_options(hf, "gpt_oss", names, window)

    return _GPT_OSS.read(given, layers, attention=AttentionSpec(sinks=True))


def _gpt_oss_to_hf(config: TransformerConfig) -> dict[str, Any]:
    hf = _GPT_OSS.write(config, ("sinks", "window"), layer_pattern=config.layer_pattern)
    if not config.attention.sinks:
        rule, fix = "must be true in this family", "set it, or choose another"
        raise invalid("attention.sinks", "family", False, rule, fix, where="gpt_oss")
    return {**hf, **sliding_to_hf(config, "gpt_oss")}


GPT_OSS = Family(
    "gpt_oss",
    _BASE
    + attention_rows(o_bias=True)
    + (("model.layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks", ()),),
    _gpt_oss_from_hf,
    _gpt_oss_to_hf,
)
