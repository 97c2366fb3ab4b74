"""The configuration of the transformer: what it refuses, what it resolves."""

from dataclasses import fields

import pytest

from forge_core import CAPABILITIES, RopeScaling, SamplingConfig, TransformerConfig


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
        ({"feed_forward": "relu"}, ["feed_forward 'relu'", "swiglu"]),
        ({"norm_eps": 0.0}, ["norm_eps 0.0", "1e-5"]),
        ({"rope_theta": 1.0}, ["rope_theta 1.0", "10000"]),
        ({"init_std": -1.0}, ["init_std -1.0", "0.02"]),
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


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_sampling_refusals(bad: dict) -> None:
    with pytest.raises(ValueError, match=f"sampling: {next(iter(bad))}"):
        SamplingConfig(**bad)


def test_resolved_values() -> None:
    config = TransformerConfig(vocab_size=16, dim=256, num_heads=4)
    assert (config.resolved_head_dim, config.resolved_num_kv_heads) == (64, 4)
    assert config.resolved_hidden_dim == 704  # 682.67 rounded up to a multiple of 64
    assert TransformerConfig(16, dim=96, num_heads=4).resolved_hidden_dim == 256  # already one
    assert TransformerConfig(16, feed_forward="gelu").resolved_hidden_dim == 1024
    other = TransformerConfig(16, num_kv_heads=2, head_dim=10, hidden_dim=7)
    assert (other.resolved_head_dim, other.resolved_num_kv_heads) == (10, 2)
    assert other.resolved_hidden_dim == 7


@pytest.mark.parametrize("kind", [TransformerConfig, RopeScaling, SamplingConfig])
def test_every_field_has_help(kind: type) -> None:
    assert all(field.metadata.get("help") for field in fields(kind))


def test_rule_names_are_unique_and_format() -> None:
    names = [rule.name for rule in CAPABILITIES]
    assert len(set(names)) == len(names)
