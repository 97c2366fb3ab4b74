"""Phi-3 and Phi-4: Llama's decoder, whose files hold queries, keys and values in one tensor, and gate and up."""

from collections.abc import Mapping
from typing import Any

from forge_core._config import is_size
from forge_core._shared.problems import invalid
from forge_core.families.dense import NORMS, OUTSIDE_LAYERS, Family, Row, layer_rows
from forge_core.families.keys import read_common, write_common
from forge_core.model.config import TransformerConfig
from forge_core.model.spec import AttentionSpec

_READS = ("sliding_window", "original_max_position_embeddings")


def _phi3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    window = hf.get("sliding_window")
    spec = AttentionSpec(window=window if is_size(window, 2**31) else None)
    given = {"rms_norm_eps": 1e-5, **hf}
    config = read_common(given, "phi3", _READS, partial_rotary=True, attention=spec)
    if config.rope_scaling is not None:
        name = config.rope_scaling.name
        rule = "is not supported, as transformers reads 'longrope' or nothing there"
        raise invalid("rope_type", "family", name, rule, "use 'default'", where="phi3")
    return config


def _phi3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    partial = config.partial_rotary_factor
    biases = ("qkv_bias", "o_bias", "feed_forward_bias")
    fixed = {"qk_norm": False, "partial_rotary_factor": partial, "rope_scaling": None}
    fixed |= dict.fromkeys(biases, False)
    hf = write_common(config, "phi3", "Phi3ForCausalLM", fixed, ("window",))
    hf["rope_parameters"] = {**hf["rope_parameters"], "partial_rotary_factor": partial}
    return {
        **hf,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": config.max_seq_len,
        "sliding_window": config.attention.window,
        # left out it is 32000, which transformers looks up in the embedding
        **({} if config.vocab_size > 32000 else {"pad_token_id": None}),
    }


def _fused(config: TransformerConfig) -> tuple[Row, ...]:
    """Rows of the tensors that are several of ours, cut by the heads of the config."""
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
            (("split", 0, parts),),
        )
        for theirs, (names, parts) in ours.items()
    )


PHI3 = Family(
    "phi3",
    OUTSIDE_LAYERS
    + NORMS
    + layer_rows("self_attn.o_proj", "mixer.o_proj")
    + layer_rows("mlp.down_proj", "feed_forward.down_proj"),
    _phi3_from_hf,
    _phi3_to_hf,
    _fused,
)
