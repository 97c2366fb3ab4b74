"""Configuration of the dense decoder, validated when made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from forge_core._rules import Rule, check
from forge_core.model.spec import AttentionSpec
from forge_core.registry import installed


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _options_of(part: str) -> dict[str, str]:
    """Metadata of an options table; such fields stay out of the hash, as dicts have none."""
    return {"help": f"keyword arguments of a {part} that is not built in"}


def is_size(value: object, most: int) -> bool:
    """Whether it is a whole number from 1 to `most`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= most


def is_finite(value: object) -> bool:
    """Whether it is a number, and neither nan nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _size(name: str, most: int, *, optional: bool = False) -> Rule:
    """Rule that a size is a whole number from 1 to `most`, or None where the field allows it."""
    return Rule(
        f"{name}_range",
        lambda c: not (optional and c[name] is None) and not is_size(c[name], most),
        f"{name} {{{name}!r}} must be a whole number, at least 1 and at most {most}",
        "give one in that range",
    )


def _name(key: str, group: str, built_in: tuple[str, ...]) -> Rule:
    """Rule that a name is built in, installed as an entry point of `group`, or an import path."""

    def unknown(c: Mapping[str, Any]) -> bool:
        name = c[key]
        if not isinstance(name, str) or not name:
            return True
        return name not in built_in and ":" not in name and not installed(name, group)

    return Rule(
        f"{group}_{key}",
        unknown,
        f"{key} {{{key}!r}} is unknown",
        f"use {' or '.join(map(repr, built_in))}, an entry point of {group}, or module:attr",
    )


def _only_llama3(key: str, default: float) -> Rule:
    """Rule that no other built-in name has a key of llama3; a scaling of your own may read it."""
    return Rule(
        f"rope_scaling_{key}_of_llama3",
        lambda c: c["name"] == "linear" and c[key] != default,
        f"{key} {{{key}}} is a key of name 'llama3', and name is {{name!r}}",
        "remove it, or use llama3",
    )


ROPE_SCALING_RULES: tuple[Rule, ...] = (
    Rule(
        "rope_scaling_factor",
        lambda c: not (is_finite(c["factor"]) and c["factor"] >= 1.0),
        "factor {factor} must be a finite number, at least 1",
        "use 1 for no stretching, 8 for Llama 3.1",
    ),
    Rule(
        "rope_scaling_order",
        lambda c: (
            not (
                is_finite(c["low_freq_factor"])
                and is_finite(c["high_freq_factor"])
                and 0.0 < c["low_freq_factor"] < c["high_freq_factor"]
            )
        ),
        "low_freq_factor {low_freq_factor} must be positive and below high_freq_factor {high_freq_factor}",
        "use 1 and 4",
    ),
    _size("original_max_position", 2**31),
    _name("name", "forge.rope_scalings", ("llama3", "linear")),
    _only_llama3("low_freq_factor", 1.0),
    _only_llama3("high_freq_factor", 4.0),
    _only_llama3("original_max_position", 8192),
)


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary wavelengths, by a name of Hugging Face's `rope_type`.

    "llama3": wavelengths above `original_max_position / low_freq_factor` are multiplied by `factor`, those
    below `original_max_position / high_freq_factor` stay, and the ones between are blended. "linear"
    (Chen et al. 2023): all are multiplied by `factor`. Others: see `inverse_frequencies`.
    """

    factor: float = _field(8.0, "how much the longest wavelengths are stretched")
    low_freq_factor: float = _field(1.0, "wavelengths over original_max_position / this: stretched")
    high_freq_factor: float = _field(4.0, "wavelengths under original_max_position / this: kept")
    original_max_position: int = _field(8192, "context length before stretching, in tokens")
    name: str = _field(
        "llama3",
        "rule of the wavelengths: llama3, linear, an entry point of forge.rope_scalings, or module:attr",
    )
    options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata=_options_of("scaling")
    )

    def __post_init__(self) -> None:
        check(vars(self), ROPE_SCALING_RULES, "rope_scaling")


def _head_dim(c: Mapping[str, Any]) -> int:
    given: int | None = c["head_dim"]
    return c["dim"] // c["num_heads"] if given is None else given


def _indivisible(c: Mapping[str, Any]) -> bool:
    return c["head_dim"] is None and c["dim"] % c["num_heads"] != 0


def _kv_heads(c: Mapping[str, Any]) -> int:
    given: int | None = c["num_kv_heads"]
    return c["num_heads"] if given is None else given


#: Far above any model that was trained, and low enough that every answer comes at once.
_SIZES = (
    _size("vocab_size", 2**31),
    _size("dim", 2**20),
    _size("num_layers", 2**12),
    _size("num_heads", 2**16),
    _size("num_kv_heads", 2**16, optional=True),
    _size("head_dim", 2**16, optional=True),
    _size("hidden_dim", 2**24, optional=True),
    _size("max_seq_len", 2**31),
)


def _sized(c: Mapping[str, Any]) -> bool:
    """Whether all sizes are sound, so that rules about several of them can be asked."""
    return not any(rule.broken(c) for rule in _SIZES)


TRANSFORMER_RULES: tuple[Rule, ...] = (
    *_SIZES,
    Rule(
        "heads_divide_dim",
        lambda c: _sized(c) and _indivisible(c),
        "dim {dim} must be divisible by num_heads {num_heads}",
        "change one of them, or give head_dim",
    ),
    Rule(
        "kv_heads_divide_heads",
        lambda c: _sized(c) and c["num_heads"] % _kv_heads(c) != 0,
        "num_heads {num_heads} must be divisible by num_kv_heads {num_kv_heads}",
        "use a divisor of num_heads",
    ),
    Rule(
        "head_dim_even",
        lambda c: _sized(c) and not _indivisible(c) and _head_dim(c) % 2 != 0,
        "the head width (head_dim {head_dim}, or dim {dim} / num_heads {num_heads}) must be even",
        "rotary embedding turns pairs: give an even head_dim",
    ),
    _name("mixer", "forge.mixers", ("attention",)),
    _name("norm", "forge.norms", ("rms_norm", "layer_norm")),
    _name("feed_forward", "forge.feed_forwards", ("swiglu", "gelu")),
    _name("block", "forge.blocks", ("pre_norm",)),
    Rule(
        "norm_eps_range",
        lambda c: not (is_finite(c["norm_eps"]) and 0.0 < c["norm_eps"] < 1.0),
        "norm_eps {norm_eps} must be between 0 and 1",
        "use 1e-5",
    ),
    Rule(
        "rope_theta_range",
        lambda c: not (is_finite(c["rope_theta"]) and c["rope_theta"] > 1.0),
        "rope_theta {rope_theta} must be a finite number above 1",
        "use 10000, or 500000 for long contexts",
    ),
    Rule(
        "init_std_range",
        lambda c: not (is_finite(c["init_std"]) and c["init_std"] >= 0.0),
        "init_std {init_std} must be a finite number, 0 or more",
        "use 0.02",
    ),
)


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and options of a dense decoder-only transformer.

    Raises ValueError listing every broken rule, one per line.

        TransformerConfig(vocab_size=256, dim=128, num_layers=4, num_heads=4)
    """

    vocab_size: int = field(metadata={"help": "number of token ids the model knows"})
    dim: int = _field(256, "width of the residual stream")
    num_layers: int = _field(4, "number of blocks")
    num_heads: int = _field(4, "query heads of each attention")
    num_kv_heads: int | None = _field(None, "key/value heads; empty: as many as query heads")
    head_dim: int | None = _field(None, "width of one head; empty: dim / num_heads")
    hidden_dim: int | None = _field(
        None,
        "width inside the feed-forward; empty: 8/3 dim rounded up to 64 (swiglu), 4 dim (gelu)",
    )
    norm: str = _field(
        "rms_norm",
        "normalisation: rms_norm, layer_norm, an entry point of forge.norms, or module:attr",
    )
    norm_eps: float = _field(1e-5, "added to the variance in every norm")
    feed_forward: str = _field(
        "swiglu",
        "feed-forward: swiglu, gelu, an entry point of forge.feed_forwards, or module:attr",
    )
    rope_theta: float = _field(10000.0, "base of the rotary wavelengths")
    rope_scaling: RopeScaling | None = field(
        default=None, metadata={"help": "Llama 3.1 stretching of the wavelengths; empty: none"}
    )
    qk_norm: bool = _field(False, "RMSNorm on each head of queries and keys (Qwen3)")
    qkv_bias: bool = _field(False, "bias in the query, key and value projections (Qwen2)")
    o_bias: bool = _field(False, "bias in the attention's output projection")
    feed_forward_bias: bool = _field(False, "bias in the feed-forward's projections")
    tie_embeddings: bool = _field(False, "the output head shares the embedding's weight")
    init_std: float = _field(
        0.02,
        "standard deviation of initial weights; residual outputs are divided by sqrt(2 num_layers)",
    )
    max_seq_len: int = _field(8192, "longest row, cached tokens included")
    mixer: str = _field(
        "attention", "token mixer: attention, an entry point of forge.mixers, or module:attr"
    )
    block: str = _field(
        "pre_norm",
        "what joins mixer and feed-forward: pre_norm, an entry point of forge.blocks, or module:attr",
    )
    attention: AttentionSpec = field(
        default=AttentionSpec(), metadata={"help": "what each attention computes"}
    )
    mixer_options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata=_options_of("mixer")
    )
    norm_options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata=_options_of("norm")
    )
    feed_forward_options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata=_options_of("feed-forward")
    )
    block_options: dict[str, Any] = field(
        default_factory=dict, hash=False, metadata=_options_of("block")
    )

    def __post_init__(self) -> None:
        check(vars(self), TRANSFORMER_RULES, "model")

    @property
    def resolved_head_dim(self) -> int:
        """Width of one head."""
        return _head_dim(vars(self))

    @property
    def resolved_num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return _kv_heads(vars(self))

    @property
    def resolved_hidden_dim(self) -> int:
        """Width inside the feed-forward."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        if self.feed_forward == "gelu":
            return 4 * self.dim
        return -(-8 * self.dim // (3 * 64)) * 64

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of projections that write into the residual stream (GPT-2)."""
        return self.init_std / (2 * self.num_layers) ** 0.5
