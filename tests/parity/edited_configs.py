"""config.json files of Hugging Face families with edited keys, and what Forge makes of each.

The weights are those that transformers makes for the edited file, all drawn, so that a key that is read in another way
gives another shape or other logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor

from forge_ckpt.hf import find_family
from forge_core.families import FAMILIES
from forge_train import ConfigError
from forge_train.build.hf_models import read_model, section_of

Keys = dict[str, Any]
GONE: Any = ...  # of a key that the edited file leaves out
NEAR, FAR = "sliding_attention", "full_attention"
#: Largest difference over the largest logit in fp32.
BOUND = 1e-5

SHAPE: Keys = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2},
    **{"moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
#: What the file of each family has beside the shape: its options, none at a value that changes nothing.
OWN: dict[str, Keys] = {
    "llama": {},
    "qwen2": {},
    "olmo2": {},
    "mistral": {"sliding_window": 5},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        **{"head_dim": 8, "query_pre_attn_scalar": 17, "sliding_window": 5},
        "layer_types": [NEAR, NEAR, FAR],
    },
    "granite": {
        **{"embedding_multiplier": 3.0, "logits_scaling": 7.0, "residual_multiplier": 0.4},
        "attention_multiplier": 0.2,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "phi3": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_QWEN, "head_dim": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {**_GROUPED, "head_dim": 8},
    "deepseek_v3": {
        **{**_GROUPED, "num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 10},
        **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10},
    },
    "gpt_oss": {
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
    },
}

#: Keys of the files that say nothing of the model, and those that are edited as tables.
_LEFT = """
model_type transformers_version architectures output_hidden_states return_dict dtype chunk_size_feed_forward
is_encoder_decoder id2label label2id problem_type _name_or_path output_attentions bos_token_id eos_token_id
rope_parameters
"""

_LINEAR = {"rope_type": "linear", "factor": 3.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_TABLES: dict[str, Any] = {
    "null": None,
    "empty": {},
    "default": {"rope_type": "default"},
    "old default": {"type": "default"},
    "linear": _LINEAR,
    "old linear": {"type": "linear", "factor": 3.0},
    "both spellings": {"type": "linear", **_LINEAR},
    "whole factor": {"rope_type": "linear", "factor": 3},
    "linear of its theta": {**_LINEAR, "rope_theta": 300.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    "yarn": _YARN,
    "yarn mscale": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn betas": {**_YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn factor": {**_YARN, "attention_factor": 1.3},
    "yarn without length": {"rope_type": "yarn", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        **{"rope_type": "longrope", "factor": 2.0},
        **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
    "theta": {"rope_theta": 300.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}

#: Keys of any family at values that its own file does not have.
_VALUES: dict[str, list[Any]] = {
    # attention
    **{key: [True] for key in ("attention_bias", "mlp_bias", "use_sliding_window", "use_qk_norm")},
    **{
        key: [True]
        for key in ("attention_sink", "attention_out_bias", "use_bidirectional_attention")
    },
    **{"qkv_bias": [True, False], "head_dim": [6, 16], "num_key_value_heads": [1, 4]},
    **{"sliding_window": [5, 0, None], "max_window_layers": [1], "sliding_window_pattern": [2]},
    "layer_types": [
        [FAR] * 3,
        [NEAR] * 3,
        [NEAR, FAR, FAR],
        [NEAR, NEAR, FAR],
        ["chunked_attention"] * 3,
        None,
    ],
    **{"attn_logit_softcapping": [2.0], "attention_multiplier": [0.3], "clip_qkv": [0.5]},
    **{"query_pre_attn_scalar": [4], "interleaved_sliding_window": [5]},
    **{"kv_lora_rank": [6], "q_lora_rank": [None]},
    # positions
    **{"partial_rotary_factor": [1.0, 0.5], "no_rope_layers": [[0, 1, 1], [1, 1, 1], [0, 0, 0]]},
    **{"no_rope_layer_interval": [2], "nope_layers": [[1]], "use_mrope": [False, True]},
    **{"rope_interleave": [False], "rope_interleaved": [True]},
    "original_max_position_embeddings": [16],
    # feed-forward and factors
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu", "silu"],
    **{"embedding_multiplier": [2.0], "residual_multiplier": [0.5], "logits_scaling": [2.0]},
    **{"logit_scale": [0.5], "final_logit_softcapping": [2.0]},
    # mixtures
    **{"norm_topk_prob": [True, False], "routed_scaling_factor": [1.7], "n_group": [1]},
    **{"topk_group": [1], "scoring_func": ["softmax", "sigmoid"]},
    "topk_method": ["greedy", "noaux_tc"],
    **{"mlp_only_layers": [[0], [1], [2]], "decoder_sparse_step": [2, 3]},
    **{"first_k_dense_replace": [0, 2], "moe_layer_freq": [1, 2], "n_shared_experts": [2]},
    **{"num_experts": [4], "num_local_experts": [4], "num_nextn_predict_layers": [0, 1, 2]},
    **{"swiglu_limit": [0.5], "swiglu_alpha": [1.3], "router_jitter_noise": [0.1]},
    # files
    **{"attention_dropout": [0.1], "pad_token_id": [5], "is_decoder": [True]},
    **{"tie_encoder_decoder": [True], "quantization_config": [{"quant_method": "fp8"}]},
}

#: Two names of one number, of which a file may have both.
_EXPERTS = {"num_experts", "num_local_experts"}
#: Names in problems that stand for an edited key: Forge's own names, and keys that contradict it.
_NAMED = {
    "type": "rope_type",
    "rope_scaling": "rope_parameters",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "num_attention_heads": "num_kv_heads",
    "num_key_value_heads": "num_kv_heads num_heads",
    "head_dim": "partial_rotary_factor",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_head_dim",
    "use_sliding_window": "sliding_window",
    "layer_types": "sliding_window",
    "num_hidden_layers": "layer_types no_rope_layers mlp_only_layers",
    "first_k_dense_replace": "mlp_only_layers",
    "num_experts_per_tok": "top_k",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_intermediate_size": "hidden_dim",
    "shared_expert_intermediate_size": "shared_hidden_dim",
    "routed_scaling_factor": "route_scale",
    "n_group": "num_groups top_groups",
    "topk_group": "top_groups",
}


@cache
def base(family: str) -> str:
    """The file that transformers writes, as JSON."""
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **OWN[family]})
    return json.dumps(config.to_dict())


def edited(family: str, keys: Keys) -> Keys:
    """The file with these keys."""
    found = {**json.loads(base(family)), **keys}
    return {key: value for key, value in found.items() if value is not GONE}


def edits(family: str) -> dict[str, Keys]:
    """Edits of one key, and of rotary tables, by a name."""
    found = {}
    for key, value in json.loads(base(family)).items():
        if key in _LEFT.split():
            continue
        changed: dict[str, Any] = {"gone": GONE, "null": None}
        if isinstance(value, bool):
            changed["flipped"] = not value
        elif isinstance(value, int | float):
            half = value // 2 if isinstance(value, int) else value / 2
            changed |= {"halved": half, "doubled": 2 * value, "zero": type(value)(0)}
        found |= {f"{key} {how}": {key: new} for how, new in changed.items() if new != value}
    own = json.loads(base(family))
    for key, values in _VALUES.items():
        found |= {f"{key} {v}": {key: v} for v in values if own.get(key, GONE) != v}
    return found | dict(_rotary_edits())


def _rotary_edits() -> Iterator[tuple[str, Keys]]:
    """Tables in the forms of transformers 4 and 5, next to one another, and for types of layers."""
    for name, table in _TABLES.items():
        yield f"rope_scaling {name}", {"rope_parameters": GONE, "rope_scaling": table}
        old = {"rope_parameters": GONE, "rope_scaling": table, "rope_theta": 300.0}
        yield f"rope_scaling {name} and a theta", old
        yield f"rope_scaling {name} next to rope_parameters", {"rope_scaling": table}
        yield f"rope_parameters {name}", {"rope_parameters": table}
        for kind, other in ((FAR, NEAR), (NEAR, FAR)):
            tables = {kind: table, other: {"rope_type": "default"}}
            yield f"rope_parameters of {kind} {name}", {"rope_parameters": tables}
    yield "rope_theta", {"rope_theta": 300.0}
    yield "rope_theta only", {"rope_parameters": GONE, "rope_theta": 300}
    local = {"rope_parameters": GONE, "rope_theta": 300.0, "rope_local_base_freq": 20.0}
    yield "rope_local_base_freq", local
    thetas = {FAR: {"rope_theta": 300.0}, NEAR: {"rope_theta": 20.0}}
    yield "a theta for each type of layer", {"rope_parameters": thetas}


@cache
def accepted(family: str) -> tuple[str, ...]:
    """Names of the edits that Forge reads."""
    return tuple(n for n, keys in edits(family).items() if not rejections(edited(family, keys)))


def several(family: str, count: int, draw: Random) -> dict[str, Keys]:
    """Edits of two or three keys, each of which Forge reads by itself."""
    found = {}
    while len(found) < count:
        names = draw.sample(accepted(family), draw.choice((2, 2, 3)))
        parts = [edits(family)[name] for name in names]
        keys = {key: value for part in parts for key, value in part.items()}
        if len(keys) == sum(map(len, parts)):
            found[", ".join(names)] = keys
    return found


def rejections(hf: Keys) -> list[Any]:
    """The problems that Forge has with a config.json."""
    try:
        section_of(find_family(hf).configs_from_hf(hf))
    except ValueError as error:
        return list(error.problems)  # type: ignore[attr-defined]
    return []


def outcome(family: str, keys: Keys, folder: Path) -> str:
    """What became of an edited file: "rejected", "equal", or "transformers rejects".

    AssertionError for other logits than those of transformers, and for problems that name no edited key.
    """
    hf = edited(family, keys)
    if problems := rejections(hf):
        assert _names(keys) & {part for p in problems for part in p.key.split(".")}, problems
        return "rejected"

    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(hf))
    try:
        reference, tokens, wanted = _theirs(folder)
    except Exception:  # of many types, by what is wrong
        return "transformers rejects"
    if not wanted.isfinite().all():
        return "transformers rejects"
    reference.save_pretrained(folder)
    file.write_text(json.dumps(hf))
    try:
        model = read_model(folder).build()
    except ConfigError:  # tensors do not fit
        if keys.keys() & _EXPERTS:  # which of both was edited is seen there only
            return "rejected"
        raise
    with torch.no_grad():
        logits = model(tokens)
    assert logits.shape == wanted.shape, keys
    difference = float((logits - wanted).abs().max() / wanted.abs().max())
    assert difference < BOUND, (family, keys, difference)
    return "equal"


def _names(keys: Keys) -> set[str]:
    """Names of edited keys, also inside of tables, and the names that Forge has for them."""
    found = set(keys)
    for value in keys.values():
        if isinstance(value, dict):
            found |= _names(value)
    return found | {name for key in found & _NAMED.keys() for name in _NAMED[key].split()}


def _theirs(folder: Path) -> tuple[Any, Tensor, Tensor]:
    """transformers' model with drawn parameters, tokens and its logits. Raises what transformers raises."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 20), generator=draw)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
                continue
            drawn = torch.randn(tensor.shape, generator=draw)
            if tensor.dim() < 2:
                tensor.add_(0.3 * drawn)
            elif "gate.weight" in name or "router.weight" in name:
                tensor.copy_(drawn)  # scores so far apart that rounding chooses no other expert
            else:
                tensor.copy_(drawn * tensor.shape[-1] ** -0.5)
        logits = model(tokens).logits
    return model, tokens, logits


assert OWN.keys() == FAMILIES.keys()
