"""The decoder of DeepSeek-V3: latent attention around a mixture of experts, whose keys and rows are another package's."""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core.families.dense import NORMS, OUTSIDE_LAYERS, Family, feed_forward_rows, layer_rows
from forge_core.families.keys import read_common, write_common
from forge_core.families.mixtures import EXPERT_KEYS
from forge_core.model.config import TransformerConfig
from forge_core.model.mla_config import MLAConfig

_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# The names of Hugging Face, of those that differ from Forge's.
_RENAMED = {
    "q_a_layernorm": "q_a_norm",
    "kv_a_proj_with_mqa": "kv_a_proj",
    "kv_a_layernorm": "kv_a_norm",
}
_BIASED = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
_ALONE = ("q_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")
_ROWS = tuple(
    row
    for name in (*_BIASED, *_ALONE)
    for row in layer_rows(
        f"self_attn.{name}", f"mixer.{_RENAMED.get(name, name)}", bias=name in _BIASED
    )
)


def _from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    rule, fix = "is missing", "write its width, or null"
    lost = (key for key in _WIDTHS if key not in hf)
    raise_problems("deepseek_v3", (Problem(key, "missing", ..., rule, fix) for key in lost))
    bias = bool(hf.get("attention_bias", False))
    reads = ("attention_bias", "qk_head_dim", "rope_interleave", *_WIDTHS, *EXPERT_KEYS)
    config = read_common(
        {key: value for key, value in hf.items() if key != "head_dim"},
        "deepseek_v3",
        reads,
        mixer="mla",
        mla=MLAConfig(
            **{key: hf[key] for key in _WIDTHS},
            rope_interleave=bool(hf.get("rope_interleave", True)),  # null is false there
        ),
        qkv_bias=bias,
        o_bias=bias,
    )
    widths = config.resolved_mla
    for key, width, rule in (
        ("qk_head_dim", widths.qk_head_dim, "the sum of qk_nope_head_dim and qk_rope_head_dim"),
        ("head_dim", widths.qk_rope_head_dim, "qk_rope_head_dim"),
    ):
        if (given := hf.get(key)) not in (None, width):
            rule = f"must be {width}, {rule}"
            raise invalid(key, "sum", given, rule, "correct it", where="deepseek_v3")
    return config


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    fixed = {
        "mixer": "mla",
        "qk_norm": False,
        "o_bias": config.qkv_bias,
        "feed_forward_bias": False,
    }
    widths = config.resolved_mla
    return {
        **write_common(config, "deepseek_v3", "DeepseekV3ForCausalLM", fixed),
        **{key: getattr(widths, key) for key in _WIDTHS},
        "head_dim": widths.qk_rope_head_dim,
        "rope_interleave": widths.rope_interleave,
        "attention_bias": config.qkv_bias,
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3", OUTSIDE_LAYERS + NORMS + _ROWS + feed_forward_rows(), _from_hf, _to_hf
)
