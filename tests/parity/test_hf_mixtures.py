"""Whole mixtures of transformers in Forge: decoder and experts from two packages, joined by `+`, same logits.

Weights come from the shards that transformers writes. Error: max|a - b| / max|b|, fp32, bound 1e-5. Scores of
a router are spread wide, so that rounding chooses no other expert.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from forge_ckpt import load_hf
from forge_ckpt.hf import HFFolder, save_hf
from forge_core import SamplingConfig, Transformer, generate
from forge_core.families import find_family
from forge_core.model import build_feed_forward
from forge_moe import MoE
from forge_moe.families import FAMILIES

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
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
            elif "gate.weight" in name:
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
    rows = decoder.rows + experts.rows(moe)
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


@pytest.mark.parametrize("case", CASES)
def test_files_go_back_bit_equal(case: str, tmp_path: Path) -> None:
    model, rows, folder = load(case)
    save_hf(tmp_path / "out", rows, model.state_dict())
    ours, theirs = HFFolder(tmp_path / "out"), HFFolder(folder)
    assert ours.entries.keys() == theirs.entries.keys()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.entries)


@pytest.mark.parametrize("case", ["olmoe", "glm4_moe_normed"])
def test_greedy_generation_equal(case: str) -> None:
    """With a cache: heads that turn in part, and norms over all heads."""
    reference, _ = saved(case)
    model, _, _ = load(case)
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = reference.generate(tokens, max_new_tokens=16, do_sample=False)[:, 9:]
    assert torch.equal(generate(model, tokens, 16, SamplingConfig(temperature=0.0)), wanted)
