"""Whole mixtures of transformers in Forge: decoder and experts from two packages, joined by `+`, same logits.

Weights come from the shards that transformers writes. Error: max|a - b| / max|b|, fp32, bound 1e-5. Scores of
a router are spread wide, so that rounding chooses no other expert.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from forge_ckpt import load_hf
from forge_ckpt.hf import HFFolder, save_hf
from forge_core import FeedForward, SamplingConfig, Transformer, generate
from forge_core.families import find_family
from forge_core.model import LayerType, build_feed_forward
from forge_moe import MoE
from forge_moe.families import FAMILIES

SHAPE: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 6.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "truncate": True,
}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-3,
    "rope_parameters": YARN,
}
GPT = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 14,
    "sliding_window": 5,
    "swiglu_limit": 0.4,
    "swiglu_alpha": 1.3,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 6.0, "truncate": False},
        **{"original_max_position_embeddings": 40, "beta_fast": 2.0, "beta_slow": 0.2},
    },
}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "mixtral_tied": (MixtralConfig, {"num_local_experts": 4, "tie_word_embeddings": True}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {**QWEN, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": (Qwen3MoeConfig, {**QWEN, "head_dim": 16, "mlp_only_layers": [1]}),
    "olmoe": (OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3}),
    "glm4_moe": (Glm4MoeConfig, GLM),
    "glm4_moe_normed": (
        Glm4MoeConfig,
        {**GLM, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2},
    ),
    "gpt_oss": (GptOssConfig, GPT),
    "gpt_oss_plain": (
        GptOssConfig,
        {
            **GPT,
            "swiglu_limit": 7.0,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "layer_types": [f"{kind}_attention" for kind in ("full", "full", "sliding", "full")],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "deepseek_v3": (DeepseekV3Config, DEEPSEEK),
    "deepseek_v3_biased": (
        DeepseekV3Config,
        {
            **DEEPSEEK,
            "attention_bias": True,
            "rope_interleave": False,
            "v_head_dim": 18,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3_plain_queries": (
        DeepseekV3Config,
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "attention_bias": True,
            "first_k_dense_replace": 2,
            "rope_parameters": {**YARN, "mscale": 0.0, "truncate": False},
        },
    ),
}


@cache
def saved(case: str) -> tuple[Any, Path]:
    """transformers' model and the folder that it was saved to, in shards."""
    kind, options = CASES[case]
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(kind(**{**SHAPE, **options})).eval()
    with torch.no_grad():
        for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
            if "inv_freq" in name:
                continue
            if tensor.dim() < 2:  # norms, biases and the selection bias off their trivial values
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif "gate.weight" in name or "router.weight" in name:
                tensor.copy_(torch.randn_like(tensor))
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.15)
    folder = Path(mkdtemp())
    reference.save_pretrained(folder, max_shard_size="60KB")
    return reference, folder


def load(case: str) -> tuple[Transformer, tuple[Any, ...], Path]:
    _, folder = saved(case)
    hf = json.loads((folder / "config.json").read_text())
    experts, decoder = FAMILIES[hf["model_type"]], find_family(hf)
    config, moe = decoder.config_from_hf(hf), experts.config_from_hf(hf)
    sparse = experts.sparse_layers(hf)
    model = Transformer(
        config, feed_forward=lambda i: MoE(moe) if i in sparse else build_feed_forward(config, i)
    )
    rows = decoder.rows + experts.rows_of(moe)
    load_hf(folder, rows, model)
    return model.eval(), rows, folder


@pytest.mark.parametrize("case", CASES)
def test_logits_equal(case: str) -> None:
    reference, _ = saved(case)
    model, _, _ = load(case)
    tokens = torch.randint(0, 96, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, wanted = model(tokens), reference(tokens).logits
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.lane("test")
@pytest.mark.parametrize("case", CASES)
def test_files_go_back_bit_equal(case: str, tmp_path: Path) -> None:
    model, rows, folder = load(case)
    save_hf(tmp_path / "out", rows, model.state_dict())
    ours, theirs = HFFolder(tmp_path / "out"), HFFolder(folder)
    assert ours.entries.keys() == theirs.entries.keys()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.entries)


@pytest.mark.lane("test")
@pytest.mark.parametrize("case", [case for case in CASES if case[:3] in ("dee", "gpt")])
def test_a_configuration_goes_back(case: str) -> None:
    reference, folder = saved(case)
    hf = json.loads((folder / "config.json").read_text())
    experts, decoder = FAMILIES[hf["model_type"]], find_family(hf)
    config, moe = decoder.config_from_hf(hf), experts.config_from_hf(hf)
    layers = experts.layers_to_hf(experts.sparse_layers(hf), config.num_layers)
    written = {**decoder.config_to_hf(config), **experts.config_to_hf(moe), **layers}
    assert (decoder.config_from_hf(written), experts.config_from_hf(written)) == (config, moe)
    theirs = AutoModelForCausalLM.from_config(type(reference.config)(**written)).eval()
    theirs.load_state_dict(reference.state_dict())
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, reference(tokens).logits)


def yarn(model: Transformer, **changes: Any) -> dict[str, Any]:
    return {"rope_scaling": replace(model.config.rope_scaling, **changes)}


#: Options, each off or at its default: fields of the decoder, of the experts ("moe"), or parts of names of tensors
#: that become what they were without it ("off").
OFF: dict[str, dict[str, Callable[[Transformer], dict[str, Any]]]] = {
    "deepseek_v3": {
        "yarn": lambda m: {"rope_scaling": None},
        "factor": lambda m: yarn(m, factor=1.0),
        "beta_fast": lambda m: yarn(m, beta_fast=32.0),
        "beta_slow": lambda m: yarn(m, beta_slow=1.0),
        "mscale": lambda m: yarn(m, mscale=1.0),
        "mscale_all_dim": lambda m: yarn(m, mscale_all_dim=1.0),
        "rope_interleave": lambda m: {"mla": replace(m.config.mla, rope_interleave=False)},
        "norm_eps": lambda m: {"norm_eps": 1e-6},
        "routed_scaling_factor": lambda m: {"moe": {"route_scale": 1.0}},
        "norm_topk_prob": lambda m: {"moe": {"normalize": "before_top_k"}},
        "n_group": lambda m: {"moe": {"num_groups": 1, "top_groups": 1}},
        "scoring_func": lambda m: {"moe": {"router": "softmax_topk"}},
        "e_score_correction_bias": lambda m: {"off": "expert_bias"},
        "shared_experts": lambda m: {"off": "shared.down_proj"},
        "q_a_layernorm": lambda m: {"off": "q_a_norm"},
        "kv_a_layernorm": lambda m: {"off": "kv_a_norm"},
    },
    "gpt_oss": {
        "yarn": lambda m: {"rope_scaling": None},
        "truncate": lambda m: yarn(m, truncate=True),
        "attention_factor": lambda m: yarn(m, attention_factor=1.0),
        "sinks": lambda m: {"off": "sinks"},
        "sliding_window": lambda m: {"layer_types": {"local": LayerType(window=6)}},
        "layer_types": lambda m: {"layer_pattern": ("global", "local")},
        "swiglu_limit": lambda m: {"moe": {"swiglu_limit": 7.0}},
        "swiglu_alpha": lambda m: {"moe": {"swiglu_alpha": 1.702}},
        **{
            name: lambda m, name=name: {"off": name}
            for name in ("router.bias", "gate_up_proj_bias", "down_proj_bias")
        },
        **{
            f"{name}_proj.bias": lambda m, name=name: {"off": f"{name}_proj.bias"}
            for name in "qkvo"
        },
    },
}


@pytest.mark.parametrize(("case", "option"), [(case, o) for case in OFF for o in OFF[case]])
@torch.no_grad()
def test_every_option_moves_logits(case: str, option: str) -> None:
    """By over a hundred times the bound, so that the parity above sees it."""
    model, _, _ = load(case)
    change = OFF[case][option](model)
    moe, off = change.pop("moe", {}), change.pop("off", "no name")
    config = replace(model.config, **change)

    def feed_forward(i: int) -> torch.nn.Module:
        old = model.layers[str(i)].feed_forward
        return MoE(replace(old.config, **moe)) if isinstance(old, MoE) else FeedForward(48, 40)

    mutant = Transformer(config, feed_forward=feed_forward).eval()
    mutant.load_state_dict(model.state_dict())
    for name, tensor in mutant.state_dict().items():
        if off in name:
            tensor.fill_(1.0 if "norm" in name else -30.0 if "sinks" in name else 0.0)
    tokens = torch.randint(0, 96, (2, 50), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens)
    assert float((mutant(tokens) - wanted).abs().max() / wanted.abs().max()) > 100 * 1e-5


@pytest.mark.parametrize("case", ["olmoe", "glm4_moe_normed", "deepseek_v3", "gpt_oss"])
def test_greedy_generation_equal(case: str) -> None:
    """With a cache: heads that turn in part, and norms over all heads."""
    reference, _ = saved(case)
    model, _, _ = load(case)
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = reference.generate(tokens, max_new_tokens=16, do_sample=False)[:, 9:]
    assert torch.equal(generate(model, tokens, 16, SamplingConfig(temperature=0.0)), wanted)
