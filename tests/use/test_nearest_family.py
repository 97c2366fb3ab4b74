"""What an export says of a model that no family holds: the keys that differ from the nearest, as the user has set them."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core import AttentionSpec
from forge_core.model import MLAConfig, MuPConfig
from forge_moe.model_section import MoESection
from forge_testing.problems import assert_problem, rejects
from forge_train.build.hf_models import family_of
from forge_train.config.model import BuiltInModelConfig

pytestmark = pytest.mark.lane("test")

SMALL: dict[str, Any] = {"vocab_size": 64, "dim": 16, "num_layers": 2, "num_heads": 2}
MUP: dict[str, Any] = {
    "parametrization": "mup",
    "mup": MuPConfig(base_dim=8, base_num_layers=1, base_head_dim=4),
}
EXPERTS = MoESection(num_experts=4)
CASES: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "latent attention": (
        {"mixer": "mla", "mla": MLAConfig()},
        "deepseek_v3",
        "model.moe.num_experts",
        0,
    ),
    "latent attention with experts": (
        {"mixer": "mla", "moe": MoESection(num_experts=4, bias=True)},
        "deepseek_v3",
        "model.moe.bias",
        True,
    ),
    "mup and norms of heads": ({**MUP, "qk_norm": True}, "granite", "model.qk_norm", True),
    "a norm": ({"norm": "layer_norm"}, "llama", "model.norm", "layer_norm"),
    "a soft cap": (
        {"attention": AttentionSpec(softcap=30.0)},
        "llama",
        "model.attention.softcap",
        30.0,
    ),
    "a balanced mixture": (
        {"moe": MoESection(num_experts=4, bias_update_rate=0.1)},
        "mixtral",
        "model.moe.bias_update_rate",
        0.1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_keys_that_differ_from_the_nearest_family(case: str) -> None:
    options, family, key, value = CASES[case]
    with rejects("model", ..., "no_family") as refused:
        family_of(BuiltInModelConfig(**{**SMALL, **options}), None)
    assert_problem(refused.value, key, value)
    _, *others = refused.value.problems
    assert {(p.origin.partition(",")[0], p.fix) for p in others} == {(family, "")}


def test_a_family_by_name_is_rejected_with_one_that_holds_the_model() -> None:
    plain, mup = BuiltInModelConfig(**SMALL), BuiltInModelConfig(**SMALL, **MUP)
    assert family_of(plain, None).name == family_of(plain, "llama").name == "llama"
    assert family_of(mup, None).name == "granite"
    mixture = BuiltInModelConfig(**SMALL, moe=EXPERTS)
    for section, family, key, value, fix in (
        (plain, "qwen3", "model.qk_norm", False, "llama"),
        (plain, "mixtral", "model.moe.num_experts", 0, "llama"),
        (mup, "llama", "model.parametrization", "mup", "granite"),
        (mixture, "llama", "model.moe.num_experts", 4, "mixtral"),
        (BuiltInModelConfig(**SMALL, norm="layer_norm"), "llama", "model.norm", "layer_norm", ""),
    ):
        with rejects(key, value) as refused:
            family_of(section, family)
        assert refused.value.where == family
        assert all(p.fix.endswith(fix) for p in refused.value.problems)
    with rejects("model.parametrization", "mup") as refused:
        family_of(mup, "llama")
    for given in ("logits_scale 0.5", "attention.scale 0.25"):
        assert given in str(refused.value)
