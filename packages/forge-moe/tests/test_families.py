"""Configurations of Hugging Face: what changes the function is read or refused, never passed over."""

import dataclasses
import math
from typing import Any

import pytest

from forge_moe import MoEConfig, families
from forge_moe.families import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    LAYERS,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    ExpertLayers,
)
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

SIGMOID = {"router": "sigmoid_topk", "expert_bias": True, "num_shared_experts": 1}
SHARED = {"num_shared_experts": 1, "shared_gate": True, "shared_hidden_dim": 8}
OPTIONS = {
    MIXTRAL: {},
    QWEN2_MOE: SHARED,
    QWEN3_MOE: {},
    OLMOE: {},
    DEEPSEEK_V3: SIGMOID,
    GLM4_MOE: SIGMOID,
    GPT_OSS: {"activation": "clamped_swiglu", "bias": True, "router_bias": True},
}
FAMILIES = pytest.mark.parametrize("family", OPTIONS, ids=lambda family: family.name)


def written(family) -> dict:
    config = MoEConfig(dim=8, hidden_dim=16, num_experts=4, **OPTIONS[family])
    return {
        **family.config_to_hf(config),
        "num_hidden_layers": 3,
        "rope_theta": 1e4,
        "use_cache": True,
    }


CHANGES = {
    "sliding_window": 4096,
    "embedding_multiplier": 12.0,
    "no_rope_layers": [1, 0],
    "swiglu_limit": 7.0,
    "layer_types": ["full_attention", "sliding_attention"],
    "clip_qkv": 8.0,
    "hidden_act": "gelu",
    "moe_layer_freq": 2,
    "quantization_config": {"quant_method": "fp8"},
}
OFF = {
    "sliding_window": None,
    "no_rope_layers": [],
    "clip_qkv": None,
    "mlp_bias": False,
    "layer_types": ["full_attention"] * 3,
    "moe_layer_freq": 1,
}


@FAMILIES
def test_F98_keys_that_change_the_function_are_rejected(family) -> None:
    hf = written(family)
    wanted = family.config_from_hf(hf)
    # gpt-oss reads its limit, and windows are its decoder's
    own = ("swiglu_limit", "sliding_window", "layer_types") if family is GPT_OSS else ()
    for key, value in CHANGES.items():
        if key in own:
            continue
        with rejects(key, value, where=family.name):
            family.config_from_hf({**hf, key: value})
    assert family.config_from_hf({**hf, **OFF}) == wanted
    window = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    assert family.config_from_hf({**hf, **window}) == wanted
    with rejects("scoring_func", "softmax") as caught:
        family.config_from_hf({**hf, "scoring_func": "softmax", "topk_method": "greedy"})
    assert_problem(caught.value, "topk_method", "greedy")


@FAMILIES
@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, True, "8", [8], None])
def test_F98_invalid_sizes_are_rejected(family, value) -> None:
    hf = written(family)
    for key in ("hidden_size", "num_experts_per_tok"):
        problem = (value, "type") if value is not None else (..., "missing")
        with rejects(key, *problem, where=family.name):
            family.config_from_hf({**hf, key: value})
    with rejects("num_hidden_layers", value, "range"):
        family.sparse_layers({**hf, "num_hidden_layers": value})


def test_F98_other_values_are_rejected_by_the_key_there() -> None:
    hf = written(DEEPSEEK_V3)
    for key, value in {"norm_topk_prob": 1, "routed_scaling_factor": "2", "n_group": 1.0}.items():
        with rejects(key, value, "type", where="deepseek_v3"):
            DEEPSEEK_V3.config_from_hf({**hf, key: value})
    for layers in (True, "x", [2.5], [[1]]):
        with rejects("mlp_only_layers", layers, "type"):
            QWEN2_MOE.sparse_layers({**written(QWEN2_MOE), "mlp_only_layers": layers})
    for kinds in (3, "x", [[1]], [None]):
        with rejects("layer_types", kinds, "unknown_key"):
            QWEN2_MOE.config_from_hf({**written(QWEN2_MOE), "layer_types": kinds})
    with rejects("decoder_sparse_step", 0, "range"):
        QWEN2_MOE.sparse_layers({**written(QWEN2_MOE), "decoder_sparse_step": 0})


def test_settings_that_a_family_cannot_express_are_rejected() -> None:
    with rejects("num_local_experts", ..., "missing"):
        MIXTRAL.config_from_hf({"hidden_size": 8, "intermediate_size": 8, "num_experts_per_tok": 2})
    hf = {**MIXTRAL.config_to_hf(MoEConfig(dim=8, hidden_dim=8, num_experts=4))}
    for key, value, code in (
        ("hidden_act", "gelu", "unsupported"),
        ("model_type", "x", "mismatch"),
    ):
        with rejects(key, value, code):
            MIXTRAL.config_from_hf({**hf, key: value})
    biased = MoEConfig(dim=8, hidden_dim=8, num_experts=4, bias_update_rate=0.1)
    with rejects("expert_bias", True, "fixed", where="mixtral"):
        MIXTRAL.config_to_hf(biased)
    with rejects("num_shared_experts", 2, "fixed"):
        shared = {"num_shared_experts": 2, "shared_hidden_dim": 8, "shared_gate": True}
        QWEN2_MOE.config_to_hf(MoEConfig(dim=8, hidden_dim=8, num_experts=4, **shared))


@FAMILIES
def test_F98_only_another_model_type_is_named(family) -> None:
    with rejects("model_type", "jamba", "mismatch", where=family.name) as caught:
        family.config_from_hf({"model_type": "jamba", "swiglu_limit": 7.5})
    assert len(caught.value.problems) == 1


def test_dense_layers_come_first_in_deepseek_and_glm() -> None:
    assert list(OPTIONS) == list(families.FAMILIES.values())
    for family, first in ((DEEPSEEK_V3, 3), (GLM4_MOE, 1)):
        hf = {**written(family), "num_hidden_layers": 5}
        assert family.sparse_layers(hf) == tuple(range(first, 5))
        assert family.sparse_layers({**hf, "first_k_dense_replace": 0}) == tuple(range(5))


def test_clamps_of_gpt_oss_are_read_and_written() -> None:
    hf = written(GPT_OSS)
    config = GPT_OSS.config_from_hf({**hf, "swiglu_limit": 5, "swiglu_alpha": 1.5})
    assert (config.swiglu_limit, config.swiglu_alpha) == (5, 1.5)
    assert GPT_OSS.config_to_hf(config)["swiglu_limit"] == 5
    old = {key: value for key, value in hf.items() if not key.startswith("swiglu")}
    assert GPT_OSS.config_from_hf(old).swiglu_limit == 7.0
    with rejects("swiglu_limit", True, "type", where="gpt_oss"):
        GPT_OSS.config_from_hf({**hf, "swiglu_limit": True})
    with rejects("activation", "clamped_swiglu", "fixed", where="mixtral"):
        MIXTRAL.config_to_hf(config)


LATER = (DEEPSEEK_V3, GLM4_MOE)


@FAMILIES
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (2, 3), (1, 3)])
def test_layers_of_mixtures_go_back_to_their_keys(family, layers) -> None:
    hf = {"model_type": family.name, "num_hidden_layers": 4}
    stepped = family in (QWEN2_MOE, QWEN3_MOE)
    if stepped or layers == (0, 1, 2, 3) or (family in LATER and layers == (2, 3)):
        assert family.sparse_layers({**hf, **family.layers_to_hf(layers, 4)}) == layers
    else:
        with rejects("layers", list(layers), "unsupported", where=family.name):
            family.layers_to_hf(layers, 4)


def test_the_mixtures_of_a_model_have_their_layers():
    hf = {"hidden_size": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    hf |= {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    found = LAYERS["qwen3_moe"].config_from_hf(hf)
    assert (found.layers, found.num_layers, found.config.num_experts) == ((1, 2), 3, 4)
    written = LAYERS["qwen3_moe"].config_to_hf(found)
    assert LAYERS["qwen3_moe"].config_from_hf({**hf, **written}) == found
    rows = LAYERS["qwen3_moe"].rows_of(found)
    assert rows == QWEN3_MOE.rows_of(found.config) == QWEN3_MOE.rows(found.config)
    biased = found._replace(config=dataclasses.replace(found.config, bias=True))
    with rejects("bias", True, "fixed") as caught:
        LAYERS["mixtral"].config_to_hf(biased)
    assert_problem(caught.value, "layers", [1, 2], "unsupported")


def test_layers_with_mixtures_have_a_first_one_and_a_step() -> None:
    config: Any = None
    for layers, found in (((0, 1, 2, 3, 4, 5), (0, 1)), ((1, 3, 5), (1, 2)), ((4,), (4, 6))):
        assert ExpertLayers(config, layers, 6).first_and_step() == found
    with rejects("mlp_only_layers", [0, 2, 3], "pattern"):
        ExpertLayers(config, (0, 2, 3), 6).first_and_step()
