"""Configuration of the dense decoder, validated when made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from forge_core._config import (
    choice_problems,
    foreign_keys,
    is_finite,
    size_problems,
    switch_problems,
)
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems
from forge_core.model.layer_types import GLOBAL, LayerType, pattern_problems
from forge_core.model.mla_config import MLAConfig
from forge_core.model.mrope import MRopeConfig
from forge_core.model.mtp_config import MTPConfig
from forge_core.model.mup import MuPConfig, Scales
from forge_core.model.mup import problems as mup_problems
from forge_core.model.spec import AttentionSpec
from forge_core.registry import installed

#: Names of the built-in parts; the tables of the parts have the same.
GATED = ("swiglu", "geglu", "geglu_tanh")
UNGATED = ("gelu", "gelu_tanh", "relu", "relu2", "silu")
NORM_NAMES = ("rms_norm", "layer_norm", "rms_norm_plus_one")
BLOCK_NAMES = ("pre_norm", "post_norm", "sandwich")


def _options_of(part: str) -> dict[str, str]:
    """Metadata of an options table; such fields stay out of the hash, as dicts have none."""
    return {"help": f"keyword arguments of a {part} that is not built in"}


def _name_problems(
    config: object, key: str, group: str, built_in: tuple[str, ...]
) -> Iterator[Problem]:
    """The problem of a name that is not built in, not an entry point of `group` and no import path."""
    name = getattr(config, key)
    known = isinstance(name, str) and name and (name in built_in or ":" in name)
    if not known and not (isinstance(name, str) and name and installed(name, group)):
        fix = f"use {' or '.join(map(repr, built_in))}, an entry point of {group}, or module:attr"
        yield Problem(key, "unknown", name, "is unknown", fix)


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary wavelengths, by a name of Hugging Face's `rope_type`.

    "llama3": wavelengths above `original_max_position / low_freq_factor` are multiplied by `factor`, those
    below `original_max_position / high_freq_factor` stay, and the ones between are blended. "linear"
    (Chen et al. 2023): all are multiplied by `factor`. "yarn" (Peng et al. 2023): pairs that turn fewer than
    `beta_slow` times within `original_max_position` are slowed down by `factor`, those that turn more than
    `beta_fast` times stay, and the ones between are blended; cosines and sines grow by the attention factor,
    which is `attention_factor`, or (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1), or without
    these 0.1 ln factor + 1. Others: see `inverse_frequencies`.
    """

    factor: float = field(8.0, "how much the longest wavelengths are stretched")
    low_freq_factor: float = field(1.0, "wavelengths over original_max_position / this: stretched")
    high_freq_factor: float = field(4.0, "wavelengths under original_max_position / this: kept")
    original_max_position: int = field(8192, "context length before stretching, in tokens")
    beta_fast: float = field(32.0, "yarn: pairs that turn more often in that context stay")
    beta_slow: float = field(1.0, "yarn: pairs that turn less often in that context are slowed")
    mscale: float | None = field(None, "yarn: growth of cosines and sines; with mscale_all_dim")
    mscale_all_dim: float | None = field(
        None,
        "yarn: growth that mscale is relative to; latent attention multiplies its scores by its square",
    )
    attention_factor: float | None = field(
        None, "yarn: factor of cosines and sines; empty: from mscale, or 0.1 ln factor + 1"
    )
    truncate: bool = field(True, "yarn: the borders of the blended pairs are whole numbers")
    name: str = field(
        "llama3",
        "rule of the wavelengths: llama3, linear, yarn, an entry point of forge.rope_scalings, or module:attr",
    )
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict, hash=False, metadata=_options_of("scaling")
    )

    def __post_init__(self) -> None:
        raise_problems("rope_scaling", _rope_scaling_problems(self))


#: Keys of RopeScaling by the built-in names that read them.
_ROPE_KEYS = {
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    "original_max_position": ("llama3", "yarn"),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate"), ("yarn",)),
    **dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"), ("yarn",)),
}
ROPE_NAMES = ("llama3", "linear", "yarn")


def _rope_scaling_problems(c: RopeScaling) -> Iterator[Problem]:
    if not (is_finite(c.factor) and c.factor >= 1.0):
        rule, fix = "must be a finite number, at least 1", "use 1 for no scaling, 8 for Llama 3.1"
        yield Problem("factor", "range", c.factor, rule, fix)
    low, high = c.low_freq_factor, c.high_freq_factor
    if not (is_finite(low) and is_finite(high) and 0.0 < low < high):
        rule = f"must be positive and below high_freq_factor {high}"
        yield Problem("low_freq_factor", "range", low, rule, "use 1 and 4")
    yield from size_problems(c, {"original_max_position": 2**31})
    yield from _name_problems(c, "name", "forge.rope_scalings", ROPE_NAMES)
    yield from _yarn_problems(c)
    yield from foreign_keys(c, _ROPE_KEYS, ROPE_NAMES)


def _yarn_problems(c: RopeScaling) -> Iterator[Problem]:
    fast, slow = c.beta_fast, c.beta_slow
    if not (is_finite(fast) and is_finite(slow) and 0.0 < slow <= fast):
        rule = f"must be positive and at most beta_fast {fast}"
        yield Problem("beta_slow", "range", slow, rule, "use 1 and 32")
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        value = getattr(c, key)
        if value is not None and not (is_finite(value) and value > 0.0):
            fix = "use 1, or leave it out"
            yield Problem(key, "range", value, "must be a finite number above 0", fix)
    yield from switch_problems(c, "truncate")

    if c.mscale is not None and c.mscale_all_dim is None:
        fix = "give that, or attention_factor"
        yield Problem("mscale", "requires", c.mscale, "must go with mscale_all_dim", fix)
    if c.mscale is not None and c.attention_factor is not None:
        value, rule = c.attention_factor, f"takes the place of mscale {c.mscale}"
        yield Problem("attention_factor", "excludes", value, rule, "give one of them")


#: Maxima far above any model that was trained, low enough that every check is instant.
_SIZES = {
    "vocab_size": 2**31,
    "dim": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "hidden_dim": 2**24,
    "max_seq_len": 2**31,
}


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and options of a dense decoder-only transformer.

    Raises ValueError listing every broken rule, one per line.

        TransformerConfig(vocab_size=256, dim=128, num_layers=4, num_heads=4)
    """

    vocab_size: int = dataclasses.field(metadata={"help": "number of token ids the model knows"})
    dim: int = field(256, "width of the residual stream")
    num_layers: int = field(4, "number of blocks")
    num_heads: int = field(4, "query heads of each attention")
    num_kv_heads: int | None = field(None, "key/value heads; empty: as many as query heads")
    head_dim: int | None = field(None, "width of one head; empty: dim / num_heads")
    hidden_dim: int | None = field(
        None,
        "width inside the feed-forward; empty: 8/3 dim rounded up to 64 (with a gate), 4 dim (without)",
    )
    norm: str = field(
        "rms_norm",
        "normalisation: rms_norm, layer_norm, rms_norm_plus_one (weights around 0, Gemma), an entry point of "
        "forge.norms, or module:attr",
    )
    norm_eps: float = field(1e-5, "added to the variance in every norm")
    feed_forward: str = field(
        "swiglu",
        "feed-forward: swiglu, geglu, geglu_tanh (Gemma), or ungated gelu, gelu_tanh, relu, relu2, silu; an entry "
        "point of forge.feed_forwards, or module:attr",
    )
    rope_theta: float = field(10000.0, "base of the rotary wavelengths")
    rope_scaling: RopeScaling | None = field(
        None, "Llama 3.1 stretching of the wavelengths; empty: none"
    )
    partial_rotary_factor: float = field(
        1.0, "share of each head's width that rotary embedding turns (GLM-4: 0.5; 0: none)"
    )
    qk_norm: bool = field(False, "RMSNorm on queries and keys (Qwen3)")
    qk_norm_over: Literal["head", "all_heads"] = field(
        "head", "what a qk_norm is over: each head, or all heads of a token together (OLMoE)"
    )
    qkv_bias: bool = field(False, "bias in the query, key and value projections (Qwen2)")
    o_bias: bool = field(False, "bias in the attention's output projection")
    feed_forward_bias: bool = field(False, "bias in the feed-forward's projections")
    tie_embeddings: bool = field(False, "the output head shares the embedding's weight")
    init_std: float = field(
        0.02,
        "standard deviation of initial weights; residual outputs are divided by sqrt(2 num_layers)",
    )
    parametrization: str = field(
        "standard",
        "how scales and rates change with width and depth: standard (not at all), or mup (so that the best stay "
        "the best)",
    )
    mup: MuPConfig = field(MuPConfig(), "the small model that mup is relative to")
    mtp: MTPConfig = field(MTPConfig(), "modules that predict tokens further ahead")
    max_seq_len: int = field(8192, "longest row, cached tokens included")
    embedding_scale: float = field(
        1.0,
        "factor of the embeddings, rounded to their dtype (Gemma: sqrt(dim); Granite's embedding_multiplier)",
    )
    residual_scale: float = field(
        1.0, "factor of what each sublayer adds to the stream (Granite's residual_multiplier)"
    )
    logits_scale: float = field(1.0, "factor of the logits (Granite: 1 / logits_scaling)")
    logits_softcap: float | None = field(
        None,
        "logits x become softcap * tanh(x / softcap) (Gemma 2: 30); empty: no cap",
    )
    mixer: str = field(
        "attention", "token mixer: attention, mla, an entry point of forge.mixers, or module:attr"
    )
    mla: MLAConfig | None = field(None, "widths of the mixer mla; empty: those of DeepSeek-V3")
    block: str = field(
        "pre_norm",
        "where norms stand: pre_norm, post_norm (behind each sublayer, OLMo 2), sandwich (both, Gemma), an entry "
        "point of forge.blocks, or module:attr",
    )
    attention: AttentionSpec = field(AttentionSpec(), "what each attention computes")
    layer_pattern: tuple[str, ...] = field(
        (),
        "types of the layers, repeated over them, such as 5 times local and once global; empty: all are global",
    )
    layer_types: dict[str, LayerType] = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={"help": "what layers of a type in layer_pattern have of their own"},
    )
    mixer_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, hash=False, metadata=_options_of("mixer")
    )
    norm_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, hash=False, metadata=_options_of("norm")
    )
    feed_forward_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, hash=False, metadata=_options_of("feed-forward")
    )
    block_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, hash=False, metadata=_options_of("block")
    )

    #: Positions of several axes, a field of configs of models that have them.
    mrope: ClassVar[MRopeConfig | None] = None

    def __post_init__(self) -> None:
        raise_problems("model", _transformer_problems(self))

    def of_layer(self, layer: int) -> Self:
        """The configuration as a mixer of this layer, counted from 0, reads it: that of its type, without a
        pattern."""
        pattern = self.layer_pattern
        name = pattern[layer % len(pattern)] if pattern else GLOBAL
        whole = replace(self, layer_pattern=(), layer_types={}) if pattern else self
        if name == GLOBAL:
            return whole
        own, spec, theta = self.layer_types[name], self.attention, self.rope_theta
        return replace(
            whole,
            attention=spec if own.window is None else replace(spec, window=own.window),
            rope_theta=theta if own.rope_theta is None else own.rope_theta,
            rope_scaling=self.rope_scaling if own.rope_scaling and own.rope else None,
            partial_rotary_factor=self.partial_rotary_factor if own.rope else 0.0,
        )

    @property
    def resolved_head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head that rotary embedding turns."""
        return int(self.resolved_head_dim * self.partial_rotary_factor)

    @property
    def resolved_num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def resolved_mla(self) -> MLAConfig:
        """Widths of latent attention."""
        return MLAConfig() if self.mla is None else self.mla

    @property
    def resolved_hidden_dim(self) -> int:
        """Width inside the feed-forward."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        if self.feed_forward in UNGATED:
            return 4 * self.dim
        return -(-8 * self.dim // (3 * 64)) * 64

    @property
    def scales(self) -> Scales:
        """Factors of the parametrization."""
        if self.parametrization == "standard":
            return Scales()
        base = self.mup.base_num_layers
        depth = 1.0 if base is None else self.num_layers / base
        return Scales(self.dim / self.mup.base_dim, depth)

    @property
    def hidden_std(self) -> float:
        """Initial standard deviation inside of blocks."""
        return self.init_std * self.scales.std

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of projections that write into the residual stream (GPT-2)."""
        return self.hidden_std / (2 * self.num_layers / self.scales.depth) ** 0.5

    def as_standard(self) -> Self:
        """The same function of the same weights in the standard parametrization, as a family of others has it."""
        if self.parametrization == "standard":
            return self
        scales, spec = self.scales, self.attention
        if self.mup.base_head_dim is not None:
            spec = replace(spec, scale=self.mup.base_head_dim**0.5 / self.resolved_head_dim)
        return replace(
            self,
            parametrization="standard",
            mup=MuPConfig(),
            attention=spec,
            residual_scale=self.residual_scale * scales.branch,
            logits_scale=self.logits_scale * scales.logits,
        )


def _transformer_problems(c: TransformerConfig) -> Iterator[Problem]:
    sizes = list(size_problems(c, _SIZES))
    yield from sizes or (_latent_problems(c) if c.mixer == "mla" else _shape_problems(c))
    yield from _name_problems(c, "mixer", "forge.mixers", ("attention", "mla"))
    if c.mla is not None and c.mixer != "mla":
        rule = f"is the table of mixer 'mla', and mixer is {c.mixer!r}"
        yield Problem("mla", "foreign", ..., rule, "remove it, or use mla")
    yield from _name_problems(c, "norm", "forge.norms", NORM_NAMES)
    yield from _name_problems(c, "feed_forward", "forge.feed_forwards", (*GATED, *UNGATED))
    yield from _name_problems(c, "block", "forge.blocks", BLOCK_NAMES)

    if not (is_finite(c.norm_eps) and 0.0 < c.norm_eps < 1.0):
        yield Problem("norm_eps", "range", c.norm_eps, "must be between 0 and 1", "use 1e-5")
    if not (is_finite(c.rope_theta) and c.rope_theta > 1.0):
        rule, fix = "must be a finite number above 1", "use 10000, or 500000 for long contexts"
        yield Problem("rope_theta", "range", c.rope_theta, rule, fix)

    scaling = c.rope_scaling
    alone = scaling is not None and scaling.mscale is None and scaling.name == "yarn"
    if c.mixer == "attention" and scaling is not None and alone and scaling.mscale_all_dim:
        value, rule = scaling.mscale_all_dim, "without mscale is read only by latent attention"
        fix = "give mscale, or remove it"
        yield Problem("rope_scaling.mscale_all_dim", "requires", value, rule, fix)

    yield from choice_problems(c, "qk_norm_over", ("head", "all_heads"))
    if c.qk_norm_over == "all_heads" and not c.qk_norm:
        rule = "must go with qk_norm, which is off"
        yield Problem("qk_norm_over", "requires", c.qk_norm_over, rule, "set qk_norm = true")

    for key in ("embedding_scale", "residual_scale", "logits_scale", "logits_softcap"):
        value = getattr(c, key)
        if not (is_finite(value) and value > 0.0) and not (
            key == "logits_softcap" and value is None
        ):
            fix = f"use {getattr(TransformerConfig, key) or 30.0}"
            yield Problem(key, "range", value, "must be a finite number above 0", fix)

    yield from pattern_problems(c.layer_pattern, c.layer_types, c.num_layers)
    yield from mup_problems(c)
    if not (is_finite(c.init_std) and c.init_std >= 0.0):
        yield Problem(
            "init_std", "range", c.init_std, "must be a finite number, 0 or more", "use 0.02"
        )


def _shape_problems(c: TransformerConfig) -> Iterator[Problem]:
    """Problems of several sizes, each of which is sound by itself."""
    uneven = c.head_dim is None and c.dim % c.num_heads != 0
    if uneven:
        rule = f"must be divisible by num_heads {c.num_heads}"
        yield Problem("dim", "divides", c.dim, rule, "change one of them, or give head_dim")
    if c.num_heads % c.resolved_num_kv_heads != 0:
        rule = f"must be divisible by num_kv_heads {c.num_kv_heads}"
        yield Problem("num_heads", "divides", c.num_heads, rule, "use a divisor of num_heads")
    if not uneven and c.resolved_head_dim % 2 != 0:
        given = f"dim {c.dim} / num_heads {c.num_heads} " if c.head_dim is None else ""
        rule = f"{given}must be even: rotary embedding rotates pairs"
        yield Problem("head_dim", "even", c.resolved_head_dim, rule, "give an even head_dim")
    elif not uneven:
        yield from _rotary_problems(c)


_UNREAD = "must go without rope_scaling, which nothing reads then"
_NOTHING_TURNS = Problem("partial_rotary_factor", "excludes", 0.0, _UNREAD, "remove it")
#: Fields that latent attention does not read, and the values at which they say nothing.
_NOT_LATENT = {"head_dim": None, "qk_norm": False}


def _latent_problems(c: TransformerConfig) -> Iterator[Problem]:
    for name, nothing in _NOT_LATENT.items():
        if getattr(c, name) != nothing:
            rule = "is not read by mixer 'mla', whose widths are in its own table"
            yield Problem(name, "mixer", getattr(c, name), rule, "remove it")
    if c.resolved_num_kv_heads != c.num_heads:
        rule = f"must be num_heads {c.num_heads} with mixer 'mla', which has keys of every head"
        yield Problem("num_kv_heads", "mixer", c.num_kv_heads, rule, "remove it")

    factor = c.partial_rotary_factor
    if factor not in (0.0, 1.0):
        rule = "must be 1, or 0 for no rotation, with mixer 'mla'"
        yield Problem("partial_rotary_factor", "mixer", factor, rule, "use mla.qk_rope_head_dim")
    elif factor == 0.0 and c.rope_scaling is not None:
        yield _NOTHING_TURNS
    if c.attention.sinks:
        rule, fix = "is not computed by mixer 'mla'", "use sinks = false, or attention"
        yield Problem("attention.sinks", "mixer", c.attention.sinks, rule, fix)


def _rotary_problems(c: TransformerConfig) -> Iterator[Problem]:
    key, factor = "partial_rotary_factor", c.partial_rotary_factor
    if not (is_finite(factor) and 0.0 <= factor <= 1.0):
        yield Problem(key, "range", factor, "must be from 0 to 1", "use 1, or 0.5 (GLM-4)")
    elif factor == 0.0 and c.rope_scaling is not None:
        yield _NOTHING_TURNS
    elif c.rotary_dim % 2 or (c.rotary_dim == 0 and factor > 0.0):
        head_dim, dims = c.resolved_head_dim, c.rotary_dim
        rule = f"of the head width {head_dim} must be an even number of dims, and it is {dims}"
        yield Problem(key, "even", factor, rule, "use 1 or 0.5")
