"""The configuration of the transformer: what it refuses, what it resolves."""

import math
from dataclasses import fields

import pytest

from forge_core import AttentionSpec, RopeScaling, SamplingConfig, TransformerConfig
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize(
    ("key", "value", "code", "options"),
    [
        ("dim", 100, "divides", {"num_heads": 3}),
        ("num_heads", 4, "divides", {"num_kv_heads": 3}),
        ("head_dim", 15, "even", {}),
        ("head_dim", 3, "even", {"head_dim": None, "dim": 12}),
        ("vocab_size", 0, "range", {}),
        ("num_layers", 0, "range", {}),
        ("num_heads", 0, "range", {}),
        ("hidden_dim", -1, "range", {}),
        ("max_seq_len", 0, "range", {}),
        ("norm", "batch", "unknown", {}),
        ("feed_forward", "relu3", "unknown", {}),
        ("norm_eps", 0.0, "range", {}),
        ("rope_theta", 1.0, "range", {}),
        ("init_std", -1.0, "range", {}),
        ("partial_rotary_factor", 1.5, "range", {}),
        ("partial_rotary_factor", math.nan, "range", {}),
        ("partial_rotary_factor", 0.1, "even", {"head_dim": 30}),
        ("qk_norm_over", "tokens", "unknown", {"qk_norm": True}),
        ("qk_norm_over", "all_heads", "requires", {}),
        ("parametrization", "mu", "unknown", {}),
    ],
)
def test_a_problem_has_key_value_and_rule(
    key: str, value: object, code: str, options: dict
) -> None:
    with rejects(key, value, code, where="model: "):
        TransformerConfig(**{"vocab_size": 16, key: value, **options})


def test_all_problems_in_one_message() -> None:
    with rejects("vocab_size", 0) as caught:
        TransformerConfig(vocab_size=0, norm="x", norm_eps=2.0)
    assert len(caught.value.problems) == 3


def test_wrong_rope_scaling_is_rejected() -> None:
    with rejects("factor", 0.5, "range", where="rope_scaling: ") as caught:
        RopeScaling(factor=0.5, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position=0)
    assert len(caught.value.problems) == 3
    assert_problem(caught.value, "low_freq_factor", 4.0, "range")
    with rejects("name", "x", "unknown"):
        RopeScaling(name="x")


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, True, "8", None])
@pytest.mark.parametrize("key", ["vocab_size", "dim", "num_layers", "num_heads", "max_seq_len"])
def test_F98_a_size_is_an_integer(key: str, value: object) -> None:
    with rejects(key, value, "range") as caught:
        TransformerConfig(**{"vocab_size": 16, key: value})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "8"])
@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_F106_rope_scaling_is_finite(key: str, value: object) -> None:
    wanted = {"high_freq_factor": ("low_freq_factor", 1.0)}.get(key, (key, value))
    with rejects(*wanted, "range", where=f"{value}"):
        RopeScaling(**{key: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "x", True])
@pytest.mark.parametrize("key", ["norm_eps", "rope_theta", "init_std"])
def test_F106_numbers_of_a_model_are_finite(key: str, value: object) -> None:
    with rejects(key, value, "range"):
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
    with rejects(key, most + 1, "range"):
        TransformerConfig(**{**shape, key: most + 1})


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", -0.1), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)]
)
def test_wrong_sampling_settings_are_rejected(key: str, value: object) -> None:
    with rejects(key, value, "range", where="sampling: "):
        SamplingConfig(**{key: value})


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
def test_wrong_attention_settings_are_rejected(key: str, values: list) -> None:
    code = {"sinks": "type", "mask": "unknown"}.get(key, "range")
    for value in values:
        with rejects(key, value, code, where="attention: "):
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
