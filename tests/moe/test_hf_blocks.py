"""Forge's expert blocks against those of transformers: same weights through the maps, same outputs.

Weights go through a checkpoint file that transformers writes, as published models come. Error of a
tensor: max|a - b| / max|b|, fp32, bound 1e-5. Tokens near a tie are left out, so that rounding cannot
choose.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from forge_ckpt.hf import to_forge, to_hf
from forge_moe import MoE, MoEConfig, families

pytestmark = pytest.mark.lane("test")

BOUND, MARGIN = 1e-5, 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
QWEN = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK = {
    **{"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    **{"moe_intermediate_size": 24, "intermediate_size": 40, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
}
CASES: dict[str, tuple[families.BlockFamily, type, dict[str, Any], tuple[int, ...]]] = {
    "mixtral": (
        families.MIXTRAL,
        MixtralConfig,
        {"intermediate_size": 40, "num_local_experts": 8},
        (0, 1, 2),
    ),
    "qwen2_moe": (
        families.QWEN2_MOE,
        Qwen2MoeConfig,
        {
            **QWEN,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "intermediate_size": 48,
        },
        (1,),
    ),
    "qwen2_moe_normalised": (
        families.QWEN2_MOE,
        Qwen2MoeConfig,
        {**QWEN, "shared_expert_intermediate_size": 20, "norm_topk_prob": True},
        (0, 1, 2),
    ),
    "qwen3_moe": (
        families.QWEN3_MOE,
        Qwen3MoeConfig,
        {**QWEN, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
        (0, 2),
    ),
    "olmoe": (
        families.OLMOE,
        OlmoeConfig,
        {"num_experts": 12, "num_experts_per_tok": 4, "intermediate_size": 24},
        (0, 1, 2),
    ),
    "deepseek_v3": (families.DEEPSEEK_V3, DeepseekV3Config, DEEPSEEK, (1, 2)),
    "deepseek_v3_raw": (
        families.DEEPSEEK_V3,
        DeepseekV3Config,
        {**DEEPSEEK, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        (1, 2),
    ),
    "glm4_moe": (
        families.GLM4_MOE,
        Glm4MoeConfig,
        {**{k: v for k, v in DEEPSEEK.items() if not k.endswith(("rank", "dim"))}, "head_dim": 16},
        (1, 2),
    ),
}


def is_of_block(name: str) -> bool:
    """Whether a tensor of a file belongs to an expert block: the rest is another package's."""
    return any(part in name for part in (".experts.", ".gate.", ".shared_expert", "_moe."))


@cache
def build(case: str) -> tuple[Any, MoEConfig, dict[str, Tensor]]:
    """transformers' model, our configuration, and the expert blocks of its checkpoint file."""
    family, config_class, options, _ = CASES[case]
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config_class(**SHAPE, **options)).eval()
    with torch.no_grad():
        for parameter in (*reference.parameters(), *reference.buffers()):
            if parameter.dim() < 2:  # norms and the selection bias off their trivial values
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    with TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    block = {name: tensor for name, tensor in tensors.items() if is_of_block(name)}
    return reference, family.config_from_hf(reference.config.to_dict()), block


def ours(case: str, layer: int) -> MoE:
    _, config, block = build(case)
    prefix = f"layers.{layer}.feed_forward."
    weights = dict(to_forge(CASES[case][0].rows_of(config), block.items()))
    moe = MoE(config).eval()
    moe.load_state_dict(
        {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    )
    return moe


def theirs(case: str, layer: int) -> nn.Module:
    return build(case)[0].model.layers[layer].mlp


def tokens(moe: MoE) -> Tensor:
    """Random tokens (2, T, D) whose choice of experts leaves a margin; few others there are."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, SHAPE["hidden_size"], generator=generator)
    clear = x[margin(moe, x) > MARGIN]
    assert len(clear) > 180
    return clear[: len(clear) // 2 * 2].view(2, -1, SHAPE["hidden_size"])


@torch.no_grad()
def margin(moe: MoE, x: Tensor) -> Tensor:
    """Gap between the last chosen and the first refused expert, and group of experts: (T,)."""
    config, routed = moe.config, moe.router.route(x)
    scores = moe.router.rule.score(routed.logits)
    if moe.router.expert_bias is not None:
        scores = scores + moe.router.expert_bias
    grouped = scores.unflatten(1, (config.num_groups, -1))  # (T, groups, E / groups)
    groups = grouped.topk(2, dim=2).values.sum(2)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, routed.ids, True)
    open_groups = groups >= groups.topk(config.top_groups, dim=1).values[:, -1:]
    open_to = open_groups.unsqueeze(2).expand_as(grouped).flatten(1)
    gap = gap_of(scores, chosen, open_to)
    every = torch.ones_like(open_groups)
    return gap.minimum(gap_of(groups, open_groups, every)) if config.num_groups > 1 else gap


def gap_of(scores: Tensor, chosen: Tensor, allowed: Tensor) -> Tensor:
    least = scores.masked_fill(~chosen, float("inf")).min(1).values
    return least - scores.masked_fill(chosen | ~allowed, float("-inf")).max(1).values


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal(case: str) -> None:
    family, _, _, sparse = CASES[case]
    reference, config, _ = build(case)
    assert family.sparse_layers(reference.config.to_dict()) == sparse
    for layer in sparse:
        moe, block = ours(case, layer), theirs(case, layer)
        x = tokens(moe).requires_grad_()
        y = x.detach().clone().requires_grad_()
        got, wanted = moe(x), block(y)
        assert error(got.detach(), wanted.detach()) < BOUND
        seed = torch.randn_like(wanted)
        got.backward(seed)
        wanted.backward(seed)
        assert error(x.grad, y.grad) < BOUND
        assert error(moe.router.weight.grad, block.gate.weight.grad) < BOUND
        hidden = config.hidden_dim
        packed = block.experts.gate_up_proj.grad  # (E, 2F, D) in memory
        pairs = {
            "gate_proj": packed[:, :hidden].mT,
            "up_proj": packed[:, hidden:].mT,
            "down_proj": block.experts.down_proj.grad.mT,
        }
        for name, grad in pairs.items():
            assert error(getattr(moe.experts, name).grad, grad) < BOUND, name


@pytest.mark.parametrize("case", CASES)
def test_maps_give_every_tensor_of_the_block_and_go_back_bit_equal(case: str) -> None:
    family, _, _, sparse = CASES[case]
    _, config, block = build(case)
    state = {
        f"layers.{layer}.feed_forward.{name}": tensor
        for layer in sparse
        for name, tensor in ours(case, layer).state_dict().items()
    }
    back = dict(to_hf(family.rows_of(config), state.items()))
    assert back.keys() == block.keys()
    for name, tensor in block.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_configurations_go_back(case: str) -> None:
    family, config_class, options, _ = CASES[case]
    reference, config, _ = build(case)
    written = family.config_to_hf(config)
    assert family.config_from_hf(written) == config
    again = config_class(**{**SHAPE, **options, **written}).to_dict()
    assert again == {
        **reference.config.to_dict(),
        **{k: again[k] for k in ("dtype", "architectures")},
    }
