"""Translation of config.json: what is refused by name."""

import importlib
import pkgutil

import pytest

from forge_core import AttentionSpec, RopeScaling, TransformerConfig, families
from forge_core.families import (
    DEEPSEEK_V3,
    FAMILIES,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    Family,
    find_family,
)
from forge_core.model import LayerType, MLAConfig
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

HF = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_every_family_is_found_by_its_model_type() -> None:
    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    made = [
        value
        for name in names
        for value in vars(importlib.import_module(f"forge_core.families.{name}")).values()
        if isinstance(value, Family)
    ]
    assert {family.name for family in made} == FAMILIES.keys()
    assert all(find_family({"model_type": family.name}) is family for family in made)


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        ({"model_type": "granite"}, "model_type", "granite", "unsupported"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu", "unsupported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            *("layer_types", ["sliding_attention"], "unsupported"),
        ),
        ({"rope_scaling": {"type": "su"}}, "rope_type", "su", "unsupported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type", "linear", "requires"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type", "yarn", "requires"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, "rope_type", "llama3", "requires"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5, "unsupported"),
    ],
)
def test_settings_that_cannot_be_represented_are_rejected_by_name(
    keys: dict, key: str, value: object, code: str
) -> None:
    for family in (LLAMA, QWEN2, QWEN3):
        with rejects(key, value, code, where=f"{family.name}: "):
            family.config_from_hf({**HF, **keys})


def test_windows_of_qwen_are_read_where_they_are_on() -> None:
    for family in (QWEN2, QWEN3):
        hf = {**HF, "use_sliding_window": True, "num_hidden_layers": 4, "sliding_window": 8}
        config = family.config_from_hf({**hf, "max_window_layers": 3})
        assert config.layer_pattern == ("global", "global", "global", "local")
        written = family.config_to_hf(config)
        assert (written["max_window_layers"], written["sliding_window"]) == (3, 8)
        assert family.config_from_hf(written) == config
        assert family.config_from_hf(hf).layer_pattern == ()  # max_window_layers is 28
        with rejects("max_window_layers", [3], "type", where=f"{family.name}: "):
            family.config_from_hf({**hf, "max_window_layers": [3]})
    with rejects("use_sliding_window", True, "unsupported", where="llama: "):
        LLAMA.config_from_hf({**HF, "use_sliding_window": True})


def test_all_problems_in_one_message() -> None:
    with rejects("vocab_size", ..., "missing") as caught:
        LLAMA.config_from_hf({"hidden_act": "relu", "rope_scaling": {"rope_type": "su"}})
    assert_problem(caught.value, "hidden_act", "relu", "unsupported")
    assert_problem(caught.value, "rope_type", "su", "unsupported")
    assert len(caught.value.problems) == 8  # and five keys more


def test_config_that_a_family_cannot_express_is_rejected() -> None:
    with rejects("norm", "layer_norm", "family", where="llama: "):
        LLAMA.config_to_hf(TransformerConfig(8, norm="layer_norm"))
    with rejects("qkv_bias", False, "family", where="qwen2: "):
        QWEN2.config_to_hf(TransformerConfig(8))
    with rejects("qk_norm", False, "family", where="qwen3: "):
        QWEN3.config_to_hf(TransformerConfig(8))
    with rejects("o_bias", True, "family", where="llama: "):
        LLAMA.config_to_hf(TransformerConfig(8, o_bias=True))
    with rejects("partial_rotary_factor", 0.5, "family", where="llama: "):
        LLAMA.config_to_hf(TransformerConfig(8, partial_rotary_factor=0.5))
    with rejects("qk_norm_over", "all_heads", "family", where="qwen3: "):
        QWEN3.config_to_hf(TransformerConfig(8, qk_norm=True, qk_norm_over="all_heads"))
    with rejects("rope_scaling.name", "my_lab:yarn", "unknown", where="llama: "):
        LLAMA.config_to_hf(TransformerConfig(8, rope_scaling=RopeScaling(name="my_lab:yarn")))


def test_both_forms_of_rotary_keys() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}
    old = LLAMA.config_from_hf({**HF, "rope_theta": 5e5, "rope_scaling": scaling})
    new = LLAMA.config_from_hf({**HF, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 32))


def test_linear_stretching_both_ways() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    config = LLAMA.config_from_hf({**HF, "rope_scaling": linear})
    assert config.rope_scaling == RopeScaling(4.0, name="linear")
    assert LLAMA.config_to_hf(config)["rope_scaling"] == linear


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {}),
        ({"beta_fast": 16.0, "truncate": False}, {"beta_fast": 16.0, "truncate": False}),
        ({"mscale": 0.7, "mscale_all_dim": 0.4}, {"mscale": 0.7, "mscale_all_dim": 0.4}),
        ({"attention_factor": 1.2}, {"attention_factor": 1.2}),
        # what transformers does not read in a dense decoder
        ({"beta_fast": None, "beta_slow": 0, "mscale": 0.7, "mscale_all_dim": 0}, {}),
        ({"mscale_all_dim": 0.4}, {}),
        (
            {"attention_factor": 1.2, "mscale": 0.7, "mscale_all_dim": 0.4},
            {"attention_factor": 1.2},
        ),
    ],
)
def test_yarn_both_ways(given: dict, kept: dict) -> None:
    config = LLAMA.config_from_hf({**HF, "rope_scaling": {**YARN, **given}})
    written = LLAMA.config_to_hf(config)["rope_scaling"]
    assert written == {**YARN, **DEFAULTS, **kept}
    assert LLAMA.config_from_hf({**HF, "rope_scaling": written}) == config


def test_head_width_of_qwen3_is_its_own() -> None:
    assert QWEN3.config_from_hf(HF).head_dim == 128
    assert QWEN3.config_from_hf({**HF, "head_dim": 8}).head_dim is None


# What other models' files say, patched into a supported one: each computes another function.
CHANGES = {
    "sliding_window": 4,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "logits_scaling": 8.0,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 4,
    "quantization_config": {"bits": 4},
    "rope_interleaved": True,
    "num_local_experts": 8,
}


@pytest.mark.parametrize(
    ("family", "key"),
    [(f, k) for f in (LLAMA, MISTRAL) for k in CHANGES if (f, k) != (MISTRAL, "sliding_window")],
    ids=lambda value: getattr(value, "name", value),
)
def test_F98_a_key_that_may_change_the_function_is_rejected(family: Family, key: str) -> None:
    hf = {**HF, "sliding_window": None, key: CHANGES[key]}
    with rejects(key, CHANGES[key], "unknown_key", where=f"{family.name}: "):
        family.config_from_hf(hf)


def test_F98_unknown_rotary_keys_are_rejected_unless_null() -> None:
    with rejects("rope_scaling.mrope_section", [1, 2], "unknown_key", where="llama: "):
        LLAMA.config_from_hf({**HF, "rope_scaling": {"type": "default", "mrope_section": [1, 2]}})
    nothing = {**dict.fromkeys(CHANGES), "rope_interleaved": False, "torch_dtype": "bfloat16"}
    assert LLAMA.config_from_hf({**HF, **nothing}) == LLAMA.config_from_hf(HF)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.5, True, None, "8", 0, -1, [8]])
@pytest.mark.parametrize("key", HF)
def test_F98_a_size_is_an_integer(key: str, value: object) -> None:
    if key == "num_key_value_heads" and value is None:
        return  # as many as query heads
    with rejects(key, value, "type", where="llama: ") as caught:
        LLAMA.config_from_hf({**HF, key: value})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", float("nan")),
        ({"rope_theta": "1e4"}, "rope_theta", "1e4"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "false"),
        ({"layer_types": 3}, "layer_types", 3),
        ({"layer_types": [3]}, "layer_types", [3]),
        ({"rope_scaling": {"type": [1]}}, "rope_scaling.type", [1]),
        ({"attention_dropout": -0.1}, "attention_dropout", -0.1),
        ({"resid_pdrop": "0.1"}, "resid_pdrop", "0.1"),
        ({"rope_parameters": "llama3"}, "rope_parameters", "llama3"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": float("nan")}},
            *("rope_scaling.factor", float("nan")),
        ),
    ],
)
def test_F98_a_value_of_another_kind_is_rejected(keys: dict, key: str, value: object) -> None:
    with rejects(key, value, "type", where="llama: "):
        LLAMA.config_from_hf({**HF, **keys})


def test_the_window_of_mistral_both_ways() -> None:
    for keys, window in (({}, 4096), ({"sliding_window": 8}, 8), ({"sliding_window": None}, None)):
        config = MISTRAL.config_from_hf({**HF, **keys})
        assert config.attention == AttentionSpec(window=window)
        assert MISTRAL.config_to_hf(config)["sliding_window"] == window
    with rejects("sliding_window", 2.5, "type", where="mistral: "):
        MISTRAL.config_from_hf({**HF, "sliding_window": 2.5})
    with rejects("attention.softcap", 50.0, "no_key", where="mistral: "):
        MISTRAL.config_to_hf(TransformerConfig(8, attention=AttentionSpec(softcap=50.0)))
    with rejects("attention.window", 8, "no_key", where="llama: "):
        LLAMA.config_to_hf(TransformerConfig(8, attention=AttentionSpec(window=8)))


# ---- decoders around mixtures

MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE)


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.name)
def test_the_decoder_around_experts_passes_their_keys_over_and_no_others(family: Family) -> None:
    hf = {**HF, "model_type": family.name}
    config = family.config_from_hf(hf)
    experts = {"num_experts_per_tok": 2, "num_experts": 8, "norm_topk_prob": True}
    assert family.config_from_hf({**hf, **experts}) == config
    assert family.config_from_hf(family.config_to_hf(config)) == config
    for key in ("embedding_multiplier", "no_rope_layers", "quantization_config", "clip_qkv"):
        with rejects(key, [1.0], "unknown_key", where=f"{family.name}: "):
            family.config_from_hf({**hf, key: [1.0]})
    with rejects("o_bias", True, "family", where=f"{family.name}: "):
        family.config_to_hf(TransformerConfig(8, o_bias=True))


def test_defaults_of_a_key_that_the_file_leaves_out_are_those_of_the_family() -> None:
    assert MIXTRAL.config_from_hf(HF).rope_theta == 1e6
    assert MIXTRAL.config_from_hf(HF).norm_eps == 1e-5
    assert GLM4_MOE.config_from_hf(HF).partial_rotary_factor == 0.5
    whole = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    assert GLM4_MOE.config_from_hf({**HF, **whole}).partial_rotary_factor == 1.0
    window = {"sliding_window": 0, "use_sliding_window": False, "max_window_layers": 28}
    for family in (QWEN2_MOE, QWEN3_MOE):
        assert family.config_from_hf({**HF, **window}) == family.config_from_hf(HF)
        with rejects("use_sliding_window", True, "unsupported"):
            family.config_from_hf({**HF, **window, "sliding_window": 4, "use_sliding_window": True})
    assert QWEN2_MOE.config_from_hf(HF).qkv_bias
    assert not QWEN2_MOE.config_from_hf({**HF, "qkv_bias": False}).qkv_bias


LATENT = {
    **{"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    **{"v_head_dim": 6, "num_key_value_heads": 2},
}


def test_latent_attention_of_deepseek() -> None:
    hf = {**HF, **LATENT, "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"}}
    config = DEEPSEEK_V3.config_from_hf(hf)
    assert (config.mixer, config.head_dim) == ("mla", None)
    assert config.mla == MLAConfig(None, 8, 6, 4, 6, rope_interleave=True)
    assert not DEEPSEEK_V3.config_from_hf({**hf, "rope_interleave": False}).mla.rope_interleave
    written = DEEPSEEK_V3.config_to_hf(config)
    assert (written["head_dim"], written["attention_bias"]) == (4, False)
    assert DEEPSEEK_V3.config_from_hf(written) == config
    # scores grow by it alone, too
    scaling = {**YARN, "mscale_all_dim": 0.7}
    yarn = DEEPSEEK_V3.config_from_hf({**hf, "rope_scaling": scaling})
    assert yarn.rope_scaling.mscale_all_dim == 0.7
    assert DEEPSEEK_V3.config_to_hf(yarn)["rope_scaling"] == {**scaling, **DEFAULTS}


@pytest.mark.parametrize(
    ("change", "key", "value", "code"),
    [
        ({"qk_head_dim": 11}, "qk_head_dim", 11, "sum"),
        ({"num_key_value_heads": 1}, "num_kv_heads", 1, "mixer"),
        ({"kv_lora_rank": None}, "kv_lora_rank", None, "range"),
        ({"quantization_config": [8]}, "quantization_config", [8], "unknown_key"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            *("partial_rotary_factor", 0.5, "unsupported"),
        ),
    ],
)
def test_settings_that_latent_attention_cannot_hold_are_rejected(
    change: dict, key: str, value: object, code: str
) -> None:
    with rejects(key, value, code):
        DEEPSEEK_V3.config_from_hf({**HF, **LATENT, **change})
    missing = {key: value for key, value in {**HF, **LATENT}.items() if key != "v_head_dim"}
    with rejects("v_head_dim", ..., "missing", where="deepseek_v3: "):
        DEEPSEEK_V3.config_from_hf(missing)
    with rejects("mixer", "attention", "family"):
        DEEPSEEK_V3.config_to_hf(TransformerConfig(8))
    with rejects("mixer", "mla", "family"):
        LLAMA.config_to_hf(DEEPSEEK_V3.config_from_hf({**HF, **LATENT}))


GPT = {"model_type": "gpt_oss", "head_dim": 8, "num_hidden_layers": 5}


def test_layers_of_gpt_oss() -> None:
    hf = {**HF, **GPT}
    config = GPT_OSS.config_from_hf(hf)
    assert config.layer_pattern == ("local", "global")
    assert config.layer_types == {"local": LayerType(window=128)}
    assert (config.attention, config.qkv_bias, config.o_bias) == (
        AttentionSpec(sinks=True),
        True,
        True,
    )
    assert (config.norm_eps, config.rope_theta) == (1e-5, 150000.0)
    yarn = RopeScaling(32.0, name="yarn", original_max_position=4096, truncate=False)
    assert config.rope_scaling == yarn
    written = GPT_OSS.config_to_hf(config)
    assert written["layer_types"] == [f"{kind}_attention" for kind in ("sliding", "full") * 2] + [
        "sliding_attention"
    ]
    assert (written["sliding_window"], written["attention_bias"]) == (128, True)
    assert GPT_OSS.config_from_hf(written) == config
    whole = GPT_OSS.config_from_hf({**hf, "layer_types": ["full_attention"] * 5})
    assert (whole.layer_pattern, whole.layer_types) == ((), {})
    assert GPT_OSS.config_to_hf(whole)["sliding_window"] is None
    old = {"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0}
    assert GPT_OSS.config_from_hf({**hf, **old}) == config


@pytest.mark.parametrize(
    ("key", "given", "value", "code"),
    [
        ("quantization_config", {"bits": 4}, {"bits": 4}, "unsupported"),
        ("layer_types", ["full_attention"], ..., "unknown"),
        ("layer_types", ["chunked_attention"] * 5, ..., "unknown"),
        ("attention_bias", "x", "x", "type"),
    ],
)
def test_settings_that_gpt_oss_cannot_hold_are_rejected(
    key: str, given: object, value: object, code: str
) -> None:
    with rejects(key, value, code, where="gpt_oss: "):
        GPT_OSS.config_from_hf({**HF, **GPT, key: given})
    with rejects("attention.sinks", False, "family", where="gpt_oss: "):
        GPT_OSS.config_to_hf(TransformerConfig(8, qkv_bias=True, o_bias=True))


def test_a_family_is_found_by_model_type_or_rejected() -> None:
    assert all(find_family({"model_type": name}) is family for name, family in FAMILIES.items())
    for name in ("gpt2", None):
        with rejects("model_type", name, "unknown", where="llama, "):
            find_family({"model_type": name})
