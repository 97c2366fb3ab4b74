"""Families with layers of several types, or with factors: what they write, and what they refuse by name."""

import pytest

from forge_core import AttentionSpec, RopeScaling, TransformerConfig, families
from forge_core.families.layers import repeated
from forge_core.model import LayerType
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

HF = {
    **{"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
}
NEAR, FAR = "sliding_attention", "full_attention"


def test_the_shortest_pattern() -> None:
    assert repeated(["global"] * 5) == ()
    assert repeated(["local", "global"] * 2) == ("local", "global")
    assert repeated([*(["local"] * 5 + ["global"]) * 4, "local", "local"]) == (
        *["local"] * 5,
        "global",
    )
    assert repeated(["global", "local", "local"]) == ("global", "local", "local")


def test_gemma_as_transformers_4_wrote_it() -> None:
    """The keys of gemma-3-1b's file, with 7 layers."""
    old = {
        **{**HF, "num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 8},
        **{"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None},
        **{"sliding_window": 4, "sliding_window_pattern": 6, "cache_implementation": "hybrid"},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
        **{"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    }
    config = families.GEMMA3.config_from_hf(old)
    assert config.layer_pattern == (*["local"] * 5, "global")
    assert config.layer_types == {"local": LayerType(window=4, rope_theta=1e4)}
    assert (config.rope_theta, config.attention, config.tie_embeddings) == (
        1e6,
        AttentionSpec(),
        True,
    )
    linear = {"rope_type": "linear", "factor": 8.0}
    scaled = families.GEMMA3.config_from_hf({**old, "rope_scaling": linear})
    assert scaled.rope_scaling == RopeScaling(8.0, name="linear")
    assert scaled.layer_types["local"].rope_scaling is False
    tables = {FAR: {"rope_theta": 1e6, **linear}, NEAR: {"rope_theta": 1e4, "rope_type": "default"}}
    kept = {k: v for k, v in old.items() if "rope" not in k}
    assert families.GEMMA3.config_from_hf({**kept, "rope_parameters": tables}) == scaled
    assert families.GEMMA3.config_from_hf(kept) == config


@pytest.mark.parametrize(
    ("key", "value", "code", "given"),
    [
        ("hidden_activation", "relu", "unknown", "relu"),
        ("hidden_activation", [], "unknown", []),
        ("attn_logit_softcapping", 50.0, "unsupported", 50.0),
        ("use_bidirectional_attention", True, "unsupported", True),
        ("layer_types", ..., "unknown", [NEAR, FAR]),
        ("layer_types", ..., "unknown", ["chunked_attention"] * 3),
        ("rope_parameters", ..., "tables", {FAR: {}, NEAR: {"rope_type": "linear"}}),
        (f"rope_parameters.{NEAR}.factor", 2.0, "unknown_key", {FAR: {}, NEAR: {"factor": 2.0}}),
        ("query_pre_attn_scalar", 0, "type", 0),
        ("final_logit_softcapping", "30", "type", "30"),
        ("sliding_window", "4", "type", "4"),
    ],
)
def test_settings_that_gemma_cannot_hold_are_rejected(
    key: str, value: object, code: str, given: object
) -> None:
    with rejects(key, value, code, where="gemma3_text: "):
        families.GEMMA3.config_from_hf({**HF, key.partition(".")[0]: given})


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"embedding_scale": 2.0}, "embedding_scale", 2.0, "family"),
        ({"block": "pre_norm"}, "block", "pre_norm", "family"),
        ({"feed_forward": "relu2"}, "feed_forward", "relu2", "family"),
        ({"attention": AttentionSpec(scale=0.3)}, "attention.scale", 0.3, "family"),
        ({"rope_scaling": RopeScaling(2.0, name="linear")}, "rope_scaling", ..., "window"),
        (
            {"layer_types": {"local": LayerType(window=3, rope=False)}},
            *("layer_types", ..., "kinds"),
        ),
    ],
)
def test_gemma_cannot_hold(options: dict, key: str, value: object, code: str) -> None:
    config = {
        **{"vocab_size": 8, "dim": 16, "num_heads": 2, "embedding_scale": 4.0, "block": "sandwich"},
        **{"norm": "rms_norm_plus_one", "qk_norm": True, "feed_forward": "geglu_tanh"},
        **{"layer_pattern": ("local", "global"), "layer_types": {"local": LayerType(window=3)}},
    }
    families.GEMMA3.config_to_hf(TransformerConfig(**config))
    with rejects(key, value, code, where="gemma3_text: "):
        families.GEMMA3.config_to_hf(TransformerConfig(**{**config, **options}))


def test_factors_of_granite_both_ways() -> None:
    for scaling in (1.0, 3.0, 8.0, 13.0, 49.0):
        keys = {
            "logits_scaling": scaling,
            "attention_multiplier": 8**-0.5,
            "residual_multiplier": 0.22,
        }
        config = families.GRANITE.config_from_hf({**HF, **keys})
        assert (config.attention, config.residual_scale) == (AttentionSpec(), 0.22)
        written = families.GRANITE.config_to_hf(config)
        assert {key: written[key] for key in keys} == keys
    assert families.GRANITE.config_from_hf(HF).attention == AttentionSpec(
        scale=1.0
    )  # the family's default
    with rejects("residual_multiplier", 0, "type", where="granite: "):
        families.GRANITE.config_from_hf({**HF, "residual_multiplier": 0})


def test_layers_of_smollm3() -> None:
    config = families.SMOLLM3.config_from_hf({**HF, "num_hidden_layers": 8})
    assert config.layer_pattern == ("global", "global", "global", "nope")
    assert (config.rope_theta, config.tie_embeddings) == (2e6, True)
    window = {"use_sliding_window": True, "sliding_window": 5}
    assert families.SMOLLM3.config_from_hf(
        {**HF, **window, "no_rope_layers": [1, 0, 1]}
    ).layer_types == {"nope_local": LayerType(window=5, rope=False)}
    plain = families.SMOLLM3.config_from_hf({**HF, "no_rope_layers": [1, 1, 1]})
    assert plain.layer_pattern == ()
    with rejects("no_rope_layers", [1], "length", where="smollm3: "):
        families.SMOLLM3.config_from_hf({**HF, "no_rope_layers": [1]})
    with rejects("no_rope_layers", [2, 0, 1], "type", where="smollm3: "):
        families.SMOLLM3.config_from_hf({**HF, "no_rope_layers": [2, 0, 1]})
    types = {"local": LayerType(rope_theta=5.0)}
    other = TransformerConfig(8, layer_pattern=("local", "global"), layer_types=types)
    with rejects("layer_types", ..., "family", where="smollm3: "):
        families.SMOLLM3.config_to_hf(other)
    with rejects("layer_types", ..., "family", where="qwen2: "):
        families.QWEN2.config_to_hf(other)


WINDOWED = {"layer_types": [NEAR, FAR, NEAR]}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (families.QWEN2, {**WINDOWED, "use_sliding_window": True}),
        (families.QWEN3, {**WINDOWED, "use_sliding_window": True}),
        (families.SMOLLM3, {**WINDOWED, "use_sliding_window": True}),
        (families.SMOLLM3, WINDOWED),
        (families.GEMMA3, {}),
        (families.GPT_OSS, WINDOWED),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_F210_windowed_layers_without_a_window_are_rejected(
    family: families.Family, keys: dict
) -> None:
    """transformers raises in the forward pass: its mask is made of the window."""
    with rejects("sliding_window", None, "layers", where=f"{family.name}: "):
        family.config_from_hf({**HF, "sliding_window": None, **keys})
    if family is families.SMOLLM3 and not keys.get("use_sliding_window"):
        # its mask has the window that its attention passes over
        with rejects("sliding_window", 4, "layers", where="smollm3: "):
            families.SMOLLM3.config_from_hf({**HF, "sliding_window": 4, **keys})
    full = {**HF, **keys, "layer_types": [FAR] * 3, "sliding_window": None}
    assert family.config_from_hf(full).layer_pattern in ((), ("global", "global", "global", "nope"))


def test_F220_full_layers_of_mistral_have_no_window() -> None:
    """AutoConfig of transformers reads a file with layer_types as Ministral."""
    for given, window in (({}, 4), ({"layer_types": None}, 4), ({"layer_types": [FAR] * 3}, None)):
        config = families.MISTRAL.config_from_hf({**HF, "sliding_window": 4, **given})
        assert config.attention.window == window
    for types in ([NEAR] * 3, [NEAR, FAR, FAR]):
        with rejects("layer_types", ["sliding_attention"], "unsupported", where="mistral: "):
            families.MISTRAL.config_from_hf({**HF, "sliding_window": 4, "layer_types": types})


def test_fused_tensors_of_phi_are_split_by_its_heads() -> None:
    config = families.PHI3.config_from_hf({**HF, "partial_rotary_factor": 0.5, "sliding_window": 4})
    assert (config.rotary_dim, config.attention) == (4, AttentionSpec(window=4))
    qkv, gate_up = families.PHI3.rows_of(config)[len(families.PHI3.rows) :]
    assert qkv[1:] == (
        tuple(f"layers.{{i}}.mixer.{name}_proj.weight" for name in "qkv"),
        (("split", 0, (16, 8, 8)),),
    )
    assert gate_up[2] == (("split", 0, 2),)
    for keys, key, value, code in (
        ({"rope_scaling": {"type": "longrope"}}, "rope_type", "longrope", "unsupported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type", "linear", "family"),
    ):
        with rejects(key, value, code, where="phi3: "):
            families.PHI3.config_from_hf({**HF, **keys})
    with rejects("qkv_bias", True, "family", where="phi3: "):
        families.PHI3.config_to_hf(TransformerConfig(8, qkv_bias=True))


def test_other_families_reject_settings_of_these() -> None:
    with rejects("layer_pattern", ("nope",), "family", where="llama: ") as caught:
        families.LLAMA.config_to_hf(
            TransformerConfig(
                8,
                layer_pattern=("nope",),
                layer_types={"nope": LayerType(rope=False)},
                residual_scale=0.5,
                logits_softcap=3.0,
                block="post_norm",
            )
        )
    assert len(caught.value.problems) == 4
    with rejects("block", "pre_norm", "family", where="olmo2: "):
        families.OLMO2.config_to_hf(TransformerConfig(8, qk_norm=True, qk_norm_over="all_heads"))
