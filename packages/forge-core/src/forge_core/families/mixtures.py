"""Decoders around mixtures of experts: attention, norms, embeddings and dense feed-forwards of these families.

Rows and keys of the experts are another package's. A `config.json` has both; here those of experts are passed
over by name (`EXPERT_KEYS`), and every other unknown key is refused as in the dense families.
"""

from collections.abc import Mapping
from typing import Any

from forge_core.families.dense import NORMS, OUTSIDE_LAYERS, QK_NORMS, Family, sublayers
from forge_core.families.keys import read_common, write_common
from forge_core.model.config import TransformerConfig

# Keys about experts: another package reads each, or refuses it.
_EXPERT_KEYS = """
aux_loss_alpha decoder_sparse_step ep_size first_k_dense_replace mlp_only_layers moe_intermediate_size
moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob num_experts num_experts_per_tok
num_local_experts num_nextn_predict_layers output_router_logits routed_scaling_factor router_aux_loss_coef
router_jitter_noise scoring_func seq_aux shared_expert_intermediate_size topk_group topk_method
"""
EXPERT_KEYS = tuple(_EXPERT_KEYS.split())
_ROWS = OUTSIDE_LAYERS + NORMS


def _plain_window(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys of a window that is off: Qwen then writes 0, null or a size that nothing reads."""
    off = () if hf.get("use_sliding_window") else ("sliding_window", "max_window_layers")
    return {key: value for key, value in hf.items() if key not in off}


def _mixtral_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    return read_common({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}, "mixtral", EXPERT_KEYS)


def _mixtral_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {"qk_norm": False, "qkv_bias": False, "o_bias": False, "feed_forward_bias": False}
    return write_common(config, "mixtral", "MixtralForCausalLM", fixed)


def _qwen2_moe_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    bias = bool(hf.get("qkv_bias", True))
    return read_common(_plain_window(hf), "qwen2_moe", ("qkv_bias", *EXPERT_KEYS), qkv_bias=bias)


def _qwen2_moe_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {"qk_norm": False, "o_bias": False, "feed_forward_bias": False}
    hf = write_common(config, "qwen2_moe", "Qwen2MoeForCausalLM", fixed)
    return {**hf, "qkv_bias": config.qkv_bias, "use_sliding_window": False}


def _qwen3_moe_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    bias = bool(hf.get("attention_bias", False))
    reads = ("attention_bias", *EXPERT_KEYS)
    options: dict[str, Any] = {"qk_norm": True, "qkv_bias": bias, "o_bias": bias}
    return read_common(_plain_window(hf), "qwen3_moe", reads, **options)


def _qwen3_moe_to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {"qk_norm": True, "o_bias": config.qkv_bias, "feed_forward_bias": False}
    hf = write_common(config, "qwen3_moe", "Qwen3MoeForCausalLM", fixed)
    return {**hf, "attention_bias": config.qkv_bias, "use_sliding_window": False}


def _glm4_moe_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    given = {key: value for key, value in hf.items() if value is not None}
    # transformers reads null as 1, and takes its default only where the key is left out
    partial = hf.get("partial_rotary_factor", 0.5)
    return read_common(
        {"rms_norm_eps": 1e-5, **given, "partial_rotary_factor": partial},
        "glm4_moe",
        ("attention_bias", "use_qk_norm", *EXPERT_KEYS),
        partial_rotary=True,
        qk_norm=bool(hf.get("use_qk_norm", False)),
        qkv_bias=bool(hf.get("attention_bias", False)),
    )


def _glm4_moe_to_hf(config: TransformerConfig) -> dict[str, Any]:
    partial = config.partial_rotary_factor
    fixed = {"o_bias": False, "feed_forward_bias": False, "partial_rotary_factor": partial}
    hf = write_common(config, "glm4_moe", "Glm4MoeForCausalLM", fixed)
    hf["rope_parameters"] = {**hf["rope_parameters"], "partial_rotary_factor": partial}
    return {
        **hf,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": partial,
    }


def _olmoe_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    bias = bool(hf.get("attention_bias", False))
    reads = ("attention_bias", *EXPERT_KEYS)
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "all_heads"}
    given = {"rms_norm_eps": 1e-5, **hf}
    return read_common(given, "olmoe", reads, qkv_bias=bias, o_bias=bias, **norm)


def _olmoe_to_hf(config: TransformerConfig) -> dict[str, Any]:
    norm = {"qk_norm": True, "qk_norm_over": "all_heads"}
    fixed = {**norm, "o_bias": config.qkv_bias, "feed_forward_bias": False}
    hf = write_common(config, "olmoe", "OlmoeForCausalLM", fixed)
    return {**hf, "attention_bias": config.qkv_bias}


_PLAIN = _ROWS + sublayers(o_bias=False, feed_forward_bias=False)
_NORMED = _ROWS + QK_NORMS + sublayers(o_bias=True, feed_forward_bias=False)
MIXTRAL = Family("mixtral", _PLAIN, _mixtral_from_hf, _mixtral_to_hf)
QWEN2_MOE = Family("qwen2_moe", _PLAIN, _qwen2_moe_from_hf, _qwen2_moe_to_hf)
QWEN3_MOE = Family("qwen3_moe", _NORMED, _qwen3_moe_from_hf, _qwen3_moe_to_hf)
OLMOE = Family("olmoe", _NORMED, _olmoe_from_hf, _olmoe_to_hf)
GLM4_MOE = Family("glm4_moe", _PLAIN + QK_NORMS, _glm4_moe_from_hf, _glm4_moe_to_hf)
