"""What an export says of a model that no family holds: the keys that differ from the nearest, as the user has set them."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core import AttentionSpec
from forge_core.model import MLAConfig, MuPConfig
from forge_train.config.experts import MoESection
from forge_train.config.schema import BuiltInModelConfig
from forge_train.hf.families import find_family

pytestmark = pytest.mark.lane("test")

SMALL: dict[str, Any] = {"vocab_size": 64, "dim": 16, "num_layers": 2, "num_heads": 2}
MUP: dict[str, Any] = {
    "parametrization": "mup",
    "mup": MuPConfig(base_dim=8, base_num_layers=1, base_head_dim=4),
}
EXPERTS = MoESection(num_experts=4)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "latent attention": (
        {"mixer": "mla", "mla": MLAConfig()},
        ["deepseek_v3, the nearest: model.moe.num_experts 0 must be 1 or more in this family"],
    ),
    "latent attention with experts": (
        {"mixer": "mla", "moe": MoESection(num_experts=4, bias=True)},
        ["deepseek_v3, the nearest: model.moe."],
    ),
    "mup and norms of heads": (
        {**MUP, "qk_norm": True},
        ["granite, the nearest: model.qk_norm True must be False in this family"],
    ),
    "a norm": (
        {"norm": "layer_norm"},
        ["llama, the nearest: model.norm 'layer_norm' must be 'rms_norm' in this family"],
    ),
    "a soft cap": (
        {"attention": AttentionSpec(softcap=30.0)},
        ["llama, the nearest: model.attention.softcap 30.0 has no key in this family"],
    ),
    "a rate of the balancing bias": (
        {"moe": MoESection(num_experts=4, bias_update_rate=0.1)},
        ["model.moe.bias_update_rate 0.1 gives expert_bias True, which must be False"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_keys_that_differ_from_the_nearest_family(case: str) -> None:
    options, wanted = CASES[case]
    with pytest.raises(ValueError, match="no family of Hugging Face holds this model") as refused:
        find_family(BuiltInModelConfig(**{**SMALL, **options}), None)
    first, *lines = str(refused.value).splitlines()
    assert first.endswith("write rows of your own and use forge_ckpt.hf.save_hf")
    assert "another family" not in str(refused.value)
    for sentence in wanted:
        assert any(sentence in line for line in lines), lines


def test_a_family_by_name_is_refused_with_one_that_holds_the_model() -> None:
    plain = BuiltInModelConfig(**SMALL)
    assert find_family(plain, None) == find_family(plain, "llama") == "llama"
    assert find_family(BuiltInModelConfig(**SMALL, **MUP), None) == "granite"
    for section, family, wanted in (
        (plain, "qwen3", "qwen3: model.qk_norm False must be True in this family; use --family llama"),
        (plain, "mixtral", "mixtral: model.moe.num_experts 0 must be 1 or more .*; use --family llama"),
        (BuiltInModelConfig(**SMALL, **MUP), "llama", "mup' gives logits_scale 0.5, which must be 1.0 .*; use --family granite"),
        (BuiltInModelConfig(**SMALL, **MUP), "llama", "mup' gives attention.scale 0.25, which has no key in this family; use"),
        (BuiltInModelConfig(**SMALL, moe=EXPERTS), "llama", "4 must be 0 .*; use --family mixtral"),
        (BuiltInModelConfig(**SMALL, norm="layer_norm"), "llama", "; no other family holds the model: write rows"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=wanted):
            find_family(section, family)
