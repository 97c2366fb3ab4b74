"""Rotary keys of config.json: frequencies are those of transformers' own configuration, or a key is rejected."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.families import DEEPSEEK_V3, FAMILIES, GEMMA3, GLM4_MOE, GPT_OSS
from forge_core.model.rope import attention_factor, inverse_frequencies, score_factor
from forge_testing.problems import assert_problem, rejects

transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
pytestmark = pytest.mark.lane("test")

HF = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
    **{"head_dim": 8, "pad_token_id": None},
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8},
    "v_head_dim": 6,
}
NEAR, FAR = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}


def folder(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {**HF, **(LATENT if name == "deepseek_v3" else {}), **copy.deepcopy(keys)}


def theirs(name: str, keys: dict[str, Any], kind: str = FAR) -> tuple[Tensor, float]:
    """Wavelengths and the factor of cosines that transformers computes for layers of a kind."""
    config = transformers.AutoConfig.for_model(name, **folder(name, keys))
    rope = config.rope_parameters
    rope = rope.get(kind, rope)
    config.rope_parameters = rope
    if rope["rope_type"] != "default":
        return rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    width = int(8 * rope.get("partial_rotary_factor", 1.0))
    return rope["rope_theta"] ** -(torch.arange(0, width, 2) / width), 1.0


def ours(name: str, keys: dict[str, Any], layer: int = 5) -> tuple[Tensor, float]:
    config = FAMILIES[name].config_from_hf(folder(name, keys)).of_layer(layer)
    width = int(8 * config.partial_rotary_factor)
    found = inverse_frequencies(width, config.rope_theta, config.rope_scaling)
    return found, attention_factor(config.rope_scaling)


def equal(one: tuple[Tensor, float], other: tuple[Tensor, float]) -> bool:
    # 1e-4: transformers computes the bounds of YaRN in fp32
    return torch.allclose(one[0], other[0], rtol=1e-4, atol=0) and abs(one[1] - other[1]) < 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "glm4_moe"])
def test_F138_two_rotary_tables_are_read_as_transformers_does_or_rejected(name: str) -> None:
    """Each pair of tables, with and without bases of their own."""
    default, other = {"rope_type": "default"}, {"rope_theta": 5e5}
    tables = [None, {}, default, YARN, {"type": "linear", "factor": 3.0}, {**YARN, **other}]
    counts = {"equal": 0, "rejected": 0}
    for scaling in tables:
        for parameters in (*tables, {**default, **other}):
            keys = {"rope_scaling": scaling, "rope_parameters": parameters}
            keys = {k: v for k, v in keys.items() if v is not None}
            try:
                found = ours(name, keys)
            except ValueError as error:
                assert_problem(error, "rope_parameters", parameters, "conflict")
                alone = [theirs(name, {**keys, table: {}}) for table in keys]
                assert not equal(*alone), keys
                counts["rejected"] += 1
            else:
                assert equal(found, theirs(name, keys)), keys
                counts["equal"] += 1
    assert min(counts.values()) > 12, counts


def test_F138_yarn_that_a_model_card_adds_is_read() -> None:
    """`rope_scaling` next to the `rope_parameters` that transformers 5 saved."""
    saved = {"rope_theta": 1e4, "rope_type": "default"}
    keys = {"rope_parameters": saved, "rope_scaling": YARN}
    for name in ("llama", "qwen2", "qwen3", "mistral"):
        assert FAMILIES[name].config_from_hf({**HF, **keys}).rope_scaling.name == "yarn"
        # without its base the table has transformers' default, not that of the other table
        with rejects("rope_parameters", {**saved, "rope_theta": 1e6}, "conflict", where=name):
            FAMILIES[name].config_from_hf(
                {**HF, **keys, "rope_parameters": {**saved, "rope_theta": 1e6}}
            )


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "rope_theta": 300.0, "rope_local_base_freq": 20.0},
        {"rope_parameters": {FAR: LINEAR, NEAR: {"rope_theta": 20.0}}},
        {"rope_parameters": {FAR: {"type": "linear", "factor": 3.0}, NEAR: {"type": "default"}}},
        {"rope_parameters": {FAR: {"rope_theta": 300.0}}, "rope_scaling": LINEAR},
        {"rope_parameters": {FAR: {**YARN, "rope_theta": 300.0}, NEAR: None}},
    ],
)
def test_F140_local_layers_of_gemma_are_not_scaled_in_any_spelling(keys: dict[str, Any]) -> None:
    assert equal(ours("gemma3_text", keys), theirs("gemma3_text", keys))
    assert equal(ours("gemma3_text", keys, layer=0), theirs("gemma3_text", keys, NEAR))


def test_F140_tables_that_transformers_passes_over_are_rejected() -> None:
    for flat in ({**LINEAR, "rope_theta": 300.0}, {"type": "linear", "factor": 3.0}):
        assert equal(theirs("gemma3_text", {"rope_parameters": flat}), theirs("gemma3_text", {}))
        with rejects("rope_parameters", ..., "tables", where="gemma3_text"):
            GEMMA3.config_from_hf({**HF, "rope_parameters": flat})
    old = {"type": "linear", "factor": 3.0}
    assert equal(theirs("gemma3_text", {"rope_scaling": old}), theirs("gemma3_text", {}))
    with rejects("rope_scaling.type", "linear", "spelling", where="gemma3_text"):
        GEMMA3.config_from_hf({**HF, "rope_scaling": old})


def test_F220_yarn_of_gemma_that_is_not_truncated_is_rejected() -> None:
    """transformers looks for `truncate` next to the tables of its layers, and truncates."""
    rotary = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding
    table = {**YARN, "rope_theta": 300.0, "beta_fast": 4.0, "beta_slow": 0.5}
    found = []
    for truncate in (True, False):
        keys = {"rope_parameters": {FAR: {**table, "truncate": truncate}}}
        config = transformers.AutoConfig.for_model("gemma3_text", **folder("gemma3_text", keys))
        found.append(rotary(config).full_attention_inv_freq)
    assert torch.equal(*found)
    assert equal(
        ours("gemma3_text", {"rope_parameters": {FAR: table}}),
        (found[0], 1.0 + 0.1 * math.log(4.0)),
    )
    for keys in (
        {"rope_parameters": {FAR: {**table, "truncate": False}}},
        {"rope_scaling": {**YARN, "truncate": False}},
    ):
        with rejects("truncate", False, "unsupported", where="gemma3_text"):
            GEMMA3.config_from_hf({**HF, **keys})
    config = GEMMA3.config_from_hf({**HF, "rope_parameters": {FAR: table}})
    changed = dataclasses.replace(config.rope_scaling, truncate=False)
    with rejects("rope_scaling.truncate", False, "family", where="gemma3_text"):
        GEMMA3.config_to_hf(dataclasses.replace(config, rope_scaling=changed))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "default"])
def test_F141_the_scale_of_latent_scores_is_that_of_transformers(kind: str) -> None:
    rope = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN, "default": {"rope_type": "default"}}
    keys = {"rope_parameters": {"rope_theta": 1e4, **rope[kind], "mscale_all_dim": 1.0}}
    # yarn_apply_mscale of modeling_deepseek_v3.py
    wanted = 1.0 if kind == "default" else (0.1 * math.log(rope[kind]["factor"]) + 1.0) ** 2
    if kind in ("linear", "llama3"):
        with rejects("mscale_all_dim", 1.0, "unsupported", where="deepseek_v3"):
            DEEPSEEK_V3.config_from_hf(folder("deepseek_v3", keys))
    else:
        config = DEEPSEEK_V3.config_from_hf(folder("deepseek_v3", keys))
        assert abs(score_factor(config.rope_scaling) - wanted) < 1e-6


def test_F141_null_and_widths_of_deepseek_are_those_of_transformers() -> None:
    for given in ({}, {"rope_interleave": None}, {"rope_interleave": False}):
        keys = folder("deepseek_v3", given)
        wanted = transformers.AutoConfig.for_model("deepseek_v3", **keys).rope_interleave
        assert DEEPSEEK_V3.config_from_hf(keys).mla.rope_interleave == bool(wanted)
    with rejects(
        "head_dim", 4, "sum", where="deepseek_v3"
    ):  # transformers turns half of the 8 dims
        DEEPSEEK_V3.config_from_hf(folder("deepseek_v3", {"head_dim": 4}))


def test_F141_an_empty_table_of_gpt_oss_is_its_default() -> None:
    for keys in ({}, {"rope_scaling": {}}, {"rope_scaling": None}, {"rope_parameters": {}}):
        assert equal(ours("gpt_oss", keys), theirs("gpt_oss", keys)), keys
    assert (
        GPT_OSS.config_from_hf(folder("gpt_oss", {"rope_scaling": {}})).rope_scaling.factor == 32.0
    )


@pytest.mark.parametrize("table", [{}, {"rope_parameters": {"rope_theta": 300.0}}])
@pytest.mark.parametrize("outside", [{}, {"partial_rotary_factor": None}, {"partial_rotary_factor": 0.25}])  # fmt: skip
def test_F141_the_rotary_width_of_glm_is_that_of_transformers(
    table: dict[str, Any], outside: dict[str, Any]
) -> None:
    """Null is not the default of the class: all dims are rotated."""
    config = transformers.AutoConfig.for_model("glm4_moe", **folder("glm4_moe", table | outside))
    rotary = transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeRotaryEmbedding(config)
    found = GLM4_MOE.config_from_hf(folder("glm4_moe", table | outside))
    assert int(8 * found.partial_rotary_factor) == 2 * len(rotary.inv_freq)


@pytest.mark.parametrize("layers", [{}, {"layer_types": None}, {"layer_types": [NEAR, NEAR, FAR] * 2}])  # fmt: skip
@pytest.mark.parametrize("pattern", [{}, {"sliding_window_pattern": 2}])
@pytest.mark.parametrize("own", [{}, {"_sliding_window_pattern": 2}, {"_sliding_window_pattern": 6}])  # fmt: skip
def test_F140_layers_of_gemma_are_those_of_transformers(
    layers: dict[str, Any], pattern: dict[str, Any], own: dict[str, Any]
) -> None:
    """transformers writes `_sliding_window_pattern` and never reads it."""
    keys = layers | pattern | own
    wanted = transformers.AutoConfig.for_model("gemma3_text", **folder("gemma3_text", keys)).layer_types  # fmt: skip
    every = own.get("_sliding_window_pattern")
    if not layers.get("layer_types") and every not in (None, pattern.get("sliding_window_pattern", 6)):  # fmt: skip
        with rejects("_sliding_window_pattern", every, "spelling", where="gemma3_text"):
            GEMMA3.config_from_hf(folder("gemma3_text", keys))
        return
    config = GEMMA3.config_from_hf(folder("gemma3_text", keys))
    windows = [config.of_layer(layer).attention.window for layer in range(6)]
    assert [FAR if window is None else NEAR for window in windows] == wanted


#: What transformers' classes take for a key that a file leaves out.
LEFT_OUT = {
    "num_key_value_heads": "resolved_num_kv_heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_F141_a_key_that_is_left_out_has_the_value_of_transformers(name: str) -> None:
    keys = {k: v for k, v in folder(name, {}).items() if k not in LEFT_OUT}
    # heads that each family's number of key and value heads divides
    keys |= {"num_attention_heads": 128, "hidden_size": 1024}
    config = transformers.AutoConfig.for_model(name, **keys)
    found = FAMILIES[name].config_from_hf(keys)
    wanted = {key: getattr(config, key) for key in LEFT_OUT}
    wanted["num_key_value_heads"] = wanted["num_key_value_heads"] or 128
    assert {key: getattr(found, ours) for key, ours in LEFT_OUT.items()} == wanted
