"""The shared topic `hf_keys`, and each package that reads a config.json."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core import families as decoders
from forge_moe import MoEConfig
from forge_moe import families as experts
from forge_testing.problems import rejects
from forge_train._shared.hf_keys import HARMLESS, TRAINING, training_rates

pytestmark = pytest.mark.lane("test")

HF = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "head_dim": 4,
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    **{"v_head_dim": 4, "num_key_value_heads": 4},
}


def folder(name: str) -> dict[str, Any]:
    return {**HF, **(LATENT if name == "deepseek_v3" else {}), "model_type": name}


@pytest.mark.parametrize("name", decoders.FAMILIES)
def test_F170_what_acts_in_training_only_and_old_keys_do_not_stop_a_decoder(name: str) -> None:
    family, hf = decoders.FAMILIES[name], folder(name)
    wanted = family.config_from_hf(hf)
    for rate in (0.0, 0.1, None):
        assert family.config_from_hf({**hf, **dict.fromkeys(TRAINING, rate)}) == wanted
    auto = {"AutoModelForCausalLM": "modeling.Model"}
    assert family.config_from_hf({**hf, **dict.fromkeys(HARMLESS, 1), "auto_map": auto}) == wanted
    with rejects("attention_dropout", "0.1", "type", where=name):
        family.config_from_hf({**hf, "attention_dropout": "0.1"})


@pytest.mark.parametrize("name", experts.FAMILIES)
def test_F170_nor_a_block_of_experts(name: str) -> None:
    family = experts.FAMILIES[name]
    later = {"router": "sigmoid_topk", "expert_bias": True, "num_shared_experts": 1}
    options: dict[str, Any] = {
        "gpt_oss": {"activation": "clamped_swiglu", "bias": True, "router_bias": True},
        "qwen2_moe": {"num_shared_experts": 1, "shared_gate": True, "shared_hidden_dim": 8},
        "deepseek_v3": later,
        "glm4_moe": later,
    }
    config = MoEConfig(dim=8, hidden_dim=16, num_experts=4, **options.get(name, {}))
    hf = family.config_to_hf(config)
    others = dict.fromkeys(HARMLESS, 1) | dict.fromkeys(TRAINING, 0.1)
    assert family.config_from_hf({**hf, **others}) == family.config_from_hf(hf)


def test_F170_rates_that_training_would_need_are_found_in_all_tables_of_the_decoder() -> None:
    hf = {"attention_dropout": 0.0, "router_jitter_noise": 0.1, "dropout": None, "top_k": 50}
    hf["text_config"] = {"resid_pdrop": 0.2, "hidden_size": 8}
    hf["vision_config"] = {"attention_dropout": 0.3}  # of the encoder, which has it
    assert training_rates(hf) == {"router_jitter_noise": 0.1, "text_config.resid_pdrop": 0.2}
    assert not HARMLESS & TRAINING
