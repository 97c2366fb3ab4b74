"""The configuration of the transformer: what it refuses, what it resolves."""

import math
from dataclasses import fields

import pytest

from forge_core import AttentionSpec, RopeScaling, SamplingConfig, TransformerConfig

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 100, "num_heads": 3}, ["dim 100", "num_heads 3", "head_dim"]),
        ({"num_heads": 4, "num_kv_heads": 3}, ["num_heads 4", "num_kv_heads 3", "divisor"]),
        ({"head_dim": 15}, ["head_dim 15", "even"]),
        ({"dim": 12, "num_heads": 4}, ["dim 12", "even"]),
        ({"vocab_size": 0}, ["vocab_size 0", "at least 1"]),
        ({"num_layers": 0}, ["num_layers 0", "at least 1"]),
        ({"num_heads": 0}, ["num_heads 0", "at least 1"]),
        ({"hidden_dim": -1}, ["hidden_dim -1", "at least 1"]),
        ({"max_seq_len": 0}, ["max_seq_len 0", "at least 1"]),
        ({"norm": "batch"}, ["norm 'batch'", "rms_norm"]),
        ({"feed_forward": "relu3"}, ["feed_forward 'relu3'", "swiglu"]),
        ({"norm_eps": 0.0}, ["norm_eps 0.0", "1e-5"]),
        ({"rope_theta": 1.0}, ["rope_theta 1.0", "10000"]),
        ({"init_std": -1.0}, ["init_std -1.0", "0.02"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor 1.5", "at most 1"]),
        ({"partial_rotary_factor": math.nan}, ["partial_rotary_factor nan", "at most 1"]),
        ({"partial_rotary_factor": 0.1, "head_dim": 30}, ["head width 30", "it is 3", "use 1"]),
        ({"qk_norm_over": "tokens", "qk_norm": True}, ["qk_norm_over 'tokens'", "'head'"]),
        ({"qk_norm_over": "all_heads"}, ["qk_norm_over 'all_heads'", "set qk_norm = true"]),
    ],
)
def test_refusal_names_value_rule_and_fix(options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match="model: ") as caught:
        TransformerConfig(**{"vocab_size": 16, **options})
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_problems_in_one_message() -> None:
    with pytest.raises(ValueError, match="vocab_size") as caught:
        TransformerConfig(vocab_size=0, norm="x", norm_eps=2.0)
    assert len(str(caught.value).splitlines()) == 3


def test_rope_scaling_refusals() -> None:
    with pytest.raises(ValueError, match=r"rope_scaling: factor 0\.5") as caught:
        RopeScaling(factor=0.5, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position=0)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, True, "8", None])
@pytest.mark.parametrize("key", ["vocab_size", "dim", "num_layers", "num_heads", "max_seq_len"])
def test_F98_a_size_is_a_whole_number(key: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=f"model: {key} {value!r} must be a whole number"
    ) as caught:
        TransformerConfig(**{"vocab_size": 16, key: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "8"])
@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_F106_rope_scaling_is_finite(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"rope_scaling: .*{key} {value}"):
        RopeScaling(**{key: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "x", True])
@pytest.mark.parametrize("key", ["norm_eps", "rope_theta", "init_std"])
def test_F106_numbers_of_a_model_are_finite(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"model: {key} {value}"):
        TransformerConfig(16, **{key: value})


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("vocab_size", 2**31),
        ("dim", 2**20),
        ("num_layers", 2**12),
        ("num_heads", 2**16),
        ("num_kv_heads", 2**16),
        ("head_dim", 2**16),
        ("hidden_dim", 2**24),
        ("max_seq_len", 2**31),
    ],
)
def test_F107_sizes_have_an_upper_bound(key: str, most: int) -> None:
    shape = {"vocab_size": 16, "head_dim": 2, "num_heads": 2**16}
    TransformerConfig(**{**shape, key: most})
    with pytest.raises(ValueError, match=f"model: {key} {most + 1} must .* at most {most}"):
        TransformerConfig(**{**shape, key: most + 1})


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_sampling_refusals(bad: dict) -> None:
    with pytest.raises(ValueError, match=f"sampling: {next(iter(bad))}"):
        SamplingConfig(**bad)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("scale", [0.0, -1.0, math.nan, math.inf, True, "x"]),
        ("softcap", [0.0, -1.0, math.nan, math.inf, True, "x"]),
        ("window", [0, -1, 2.5, True, "x"]),
        ("sinks", [0, 1, None, "x"]),
        ("mask", ["", "full", None, 3]),
    ],
)
def test_attention_refusals(key: str, values: list) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"attention: {key} {value!r} must be"):
            AttentionSpec(**{key: value})


def test_resolved_values() -> None:
    config = TransformerConfig(vocab_size=16, dim=256, num_heads=4)
    assert (config.resolved_head_dim, config.resolved_num_kv_heads) == (64, 4)
    assert config.resolved_hidden_dim == 704  # 682.67 rounded up to a multiple of 64
    assert TransformerConfig(16, dim=96, num_heads=4).resolved_hidden_dim == 256  # already one
    assert TransformerConfig(16, feed_forward="gelu").resolved_hidden_dim == 1024
    other = TransformerConfig(16, num_kv_heads=2, head_dim=10, hidden_dim=7)
    assert (other.resolved_head_dim, other.resolved_num_kv_heads) == (10, 2)
    assert other.resolved_hidden_dim == 7


@pytest.mark.parametrize("kind", [TransformerConfig, AttentionSpec, RopeScaling, SamplingConfig])
def test_every_field_has_help(kind: type) -> None:
    assert all(field.metadata.get("help") for field in fields(kind))
