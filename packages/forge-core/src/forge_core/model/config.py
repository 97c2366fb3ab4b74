"""Configuration of the dense decoder, validated when made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from forge_core._config import (
    choice_problems,
    is_finite,
    is_size,
    name_problems,
    number_problems,
    options_field,
    size_problems,
    switch_problems,
    table_field,
)
from forge_core._renamed import renamed
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems
from forge_core.model.attention_ops import AttentionSpec
from forge_core.model.block import BLOCKS, MIXERS
from forge_core.model.feed_forward import FEED_FORWARDS, UNGATED
from forge_core.model.mla import MLAConfig
from forge_core.model.mtp import MTPConfig
from forge_core.model.mup import MuPConfig, Scales
from forge_core.model.mup import problems as mup_problems
from forge_core.model.norm import NORMS
from forge_core.model.rope import MRopeConfig, RopeScaling

#: The type of a layer with the keys of the model itself; it has no table.
GLOBAL = "global"


@dataclass(frozen=True)
class LayerType:
    """Keys of the attention of some layers; a field at its default is as in the model.

    Gemma 3 has five local layers for a global one, gpt-oss one for one, SmolLM3 no rotary positions in each fourth.

    LayerType(window=512, rope_theta=1e4, rope_scaling=False)   # local layers of Gemma 3
    LayerType(rope=False)                                       # NoPE (Kazemnejad et al. 2023)
    """

    window: int | None = field(
        None, "tokens that one sees, itself among them; empty: as model.attention.window"
    )
    rope_theta: float | None = field(
        None, "base of the rotary wavelengths; empty: as model.rope_theta"
    )
    rope_scaling: bool = field(True, "model.rope_scaling holds; false: wavelengths are plain")
    rope: bool = field(True, "queries and keys are rotated by their positions; false: NoPE")

    def __post_init__(self) -> None:
        raise_problems("layer_types", _layer_type_problems(self))


def _layer_type_problems(c: LayerType) -> Iterator[Problem]:
    """Yield problems of a layer type: no key at all, a window out of range, keys that exclude each other."""
    if all(getattr(c, f.name) == f.default for f in fields(c)):
        fix = f"give it a key, or put {GLOBAL!r} into layer_pattern"
        yield Problem("", "missing", ..., f"a type without any key is {GLOBAL!r}", fix)
    if c.window is not None and not is_size(c.window, 2**31):
        rule = "must be a whole number, at least 1"
        yield Problem("window", "range", c.window, rule, "use 512, or leave it out")
    yield from number_problems(c, 1, {"rope_theta": "use 10000, or leave it out"})
    yield from switch_problems(c, "rope_scaling", "rope")
    if c.rope is False and (c.rope_theta is not None or c.rope_scaling is False):
        rule = "must go without rope_theta and rope_scaling, which nothing reads then"
        yield Problem("rope", "excludes", c.rope, rule, "remove them")


def _pattern_problems(
    pattern: tuple[str, ...], types: dict[str, LayerType], num_layers: Any
) -> Iterator[Problem]:
    """Problems of a layer_pattern: names without a table, tables without a layer, its length."""
    if not (isinstance(pattern, tuple) and all(isinstance(name, str) for name in pattern)):
        fix = f"use ('local', {GLOBAL!r})"
        yield Problem("layer_pattern", "type", pattern, "must be a tuple of names", fix)
        return

    if GLOBAL in types:
        rule = "must not be there: such layers are as the model's keys set them"
        yield Problem(f"layer_types.{GLOBAL}", "reserved", ..., rule, "use another name")
    for name in sorted({name for name in pattern if name != GLOBAL and name not in types}):
        rule, fix = f"must be {GLOBAL!r} or have a table", f"write [model.layer_types.{name}]"
        yield Problem("layer_pattern", "unknown", name, rule, fix)
    for name in sorted(types.keys() - {*pattern, GLOBAL}):
        fix = f"put {name!r} into layer_pattern, or remove it"
        yield Problem(f"layer_types.{name}", "unused", ..., "is the type of no layer", fix)

    if isinstance(num_layers, int) and len(pattern) > num_layers:
        rule = f"has {len(pattern)} types and must not be longer than num_layers {num_layers}"
        yield Problem("layer_pattern", "length", pattern, rule, "shorten it")


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

    vocab_size: int = dataclasses.field(
        metadata={"help": "size of the vocabulary: number of token ids"}
    )
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
        "normalization: rms_norm, layer_norm, rms_norm_plus_one (weights around 0, Gemma), an entry point of "
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
        None, "scaling of the wavelengths for longer contexts; empty: none"
    )
    partial_rotary_factor: float = field(
        1.0, "fraction of each head's width that rotary embedding rotates (GLM-4: 0.5; 0: none)"
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
        "how scales and learning rates change with width and depth: standard (not at all), or mup (optimal learning "
        "rates transfer from a small model)",
    )
    mup: MuPConfig = field(MuPConfig(), "the small model that mup is relative to")
    mtp: MTPConfig = field(MTPConfig(), "modules of multi-token prediction")
    max_seq_len: int = field(8192, "longest sequence, cached tokens included")
    embedding_scale: float = field(
        1.0,
        "factor of the embeddings, rounded to their dtype (Gemma: sqrt(dim); Granite's embedding_multiplier)",
    )
    residual_scale: float = field(
        1.0, "factor of the output of each sublayer (Granite's residual_multiplier)"
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
        "where the norms are: pre_norm, post_norm (after each sublayer, OLMo 2), sandwich (both, Gemma), an entry "
        "point of forge.blocks, or module:attr",
    )
    attention: AttentionSpec = field(AttentionSpec(), "what each attention computes")
    layer_pattern: tuple[str, ...] = field(
        (),
        "types of the layers, repeated over them, such as 5 times local and once global; empty: all are global",
    )
    layer_types: dict[str, LayerType] = table_field("keys of layers of a type in layer_pattern")
    mixer_options: dict[str, Any] = options_field("mixer")
    norm_options: dict[str, Any] = options_field("norm")
    feed_forward_options: dict[str, Any] = options_field("feed-forward")
    block_options: dict[str, Any] = options_field("block")

    #: Positions of several axes, a field of configs of models that have them.
    mrope: ClassVar[MRopeConfig | None] = None

    def __post_init__(self) -> None:
        raise_problems("model", _transformer_problems(self))

    def of_layer(self, layer: int) -> Self:
        """Return the configuration of this layer, counted from 0, for a mixer: that of its type, without a pattern."""
        pattern = self.layer_pattern
        name = pattern[layer % len(pattern)] if pattern else GLOBAL
        plain = replace(self, layer_pattern=(), layer_types={}) if pattern else self
        if name == GLOBAL:
            return plain
        own, spec, theta = self.layer_types[name], self.attention, self.rope_theta
        return replace(
            plain,
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
        """Rotated width of each head."""
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
        # three matrices of 8/3 dim have the parameters of two of 4 dim (Shazeer 2020)
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
        """Return the configuration of the same function of the same weights in the standard parametrization.

        Modules are built from it.
        """
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
    yield from name_problems(c, "mixer", MIXERS)
    if c.mla is not None and c.mixer != "mla":
        rule = f"is the table of mixer 'mla', and mixer is {c.mixer!r}"
        yield Problem("mla", "foreign", ..., rule, "remove it, or use mla")
    yield from name_problems(c, "norm", NORMS)
    yield from name_problems(c, "feed_forward", FEED_FORWARDS)
    yield from name_problems(c, "block", BLOCKS)

    if not (is_finite(c.norm_eps) and 0.0 < c.norm_eps < 1.0):
        yield Problem("norm_eps", "range", c.norm_eps, "must be between 0 and 1", "use 1e-5")
    yield from number_problems(c, 1, {"rope_theta": "use 10000, or 500000 for long contexts"})

    scaling = c.rope_scaling if c.mixer == "attention" else None
    if scaling is not None and (scaling.name, scaling.mscale) == ("yarn", None):
        value, rule = scaling.mscale_all_dim, "without mscale is read only by latent attention"
        if value:
            fix = "give mscale, or remove it"
            yield Problem("rope_scaling.mscale_all_dim", "requires", value, rule, fix)

    yield from choice_problems(c, "qk_norm_over", ("head", "all_heads"))
    if c.qk_norm_over == "all_heads" and not c.qk_norm:
        rule = "must go with qk_norm, which is off"
        yield Problem("qk_norm_over", "requires", c.qk_norm_over, rule, "set qk_norm = true")

    factors = dict.fromkeys(("embedding_scale", "residual_scale", "logits_scale"), "use 1.0")
    yield from number_problems(c, 0, {**factors, "logits_softcap": "use 30.0"})
    yield from _pattern_problems(c.layer_pattern, c.layer_types, c.num_layers)
    yield from mup_problems(c)
    if not (is_finite(c.init_std) and c.init_std >= 0.0):
        rule = "must be a finite number, 0 or more"
        yield Problem("init_std", "range", c.init_std, rule, "use 0.02")


def _shape_problems(c: TransformerConfig) -> Iterator[Problem]:
    """Problems of sizes that do not fit each other."""
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
_NOTHING_ROTATES = Problem("partial_rotary_factor", "excludes", 0.0, _UNREAD, "remove it")


def _latent_problems(c: TransformerConfig) -> Iterator[Problem]:
    """Keys of plain attention that mixer 'mla' does not read or computes; `MLAConfig` checks its own widths."""
    for name in ("head_dim", "qk_norm"):
        if getattr(c, name) != getattr(TransformerConfig, name):
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
        yield _NOTHING_ROTATES
    if c.attention.sinks:
        rule, fix = "is not computed by mixer 'mla'", "use sinks = false, or attention"
        yield Problem("attention.sinks", "mixer", c.attention.sinks, rule, fix)


def _rotary_problems(c: TransformerConfig) -> Iterator[Problem]:
    key, factor = "partial_rotary_factor", c.partial_rotary_factor
    if not (is_finite(factor) and 0.0 <= factor <= 1.0):
        yield Problem(key, "range", factor, "must be from 0 to 1", "use 1, or 0.5 (GLM-4)")
    elif factor == 0.0 and c.rope_scaling is not None:
        yield _NOTHING_ROTATES
    elif c.rotary_dim % 2 or (c.rotary_dim == 0 and factor > 0.0):
        head_dim, dims = c.resolved_head_dim, c.rotary_dim
        rule = f"of the head width {head_dim} must be an even number of dims, and it is {dims}"
        yield Problem(key, "even", factor, rule, "use 1 or 0.5")


__getattr__ = renamed(__name__)
