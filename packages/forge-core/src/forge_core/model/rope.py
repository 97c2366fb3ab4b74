"""Rotary position embedding (Su et al. 2021): frequencies and their scaling, tables, and the rotation.

Pairs are those of Hugging Face's Llama: dim d of a head goes with dim d + D / 2. Tables are computed from positions in
each forward and never stored, so a model built on the meta device has no buffer that could stay uninitialized.

Shapes: B sequences, S tokens, H heads, D rotated width of a head, which has D / 2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core import _config
from forge_core._config import options_field
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems
from forge_core._torch_compat import takes_kernel
from forge_core.registry import Registry


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary wavelengths for longer contexts, by a name of Hugging Face's `rope_type`.

    "llama3": wavelengths above `original_max_position / low_freq_factor` are multiplied by `factor`, those
    below `original_max_position / high_freq_factor` stay, and the ones between are blended. "linear"
    (Chen et al. 2023): all are multiplied by `factor`. "yarn" (Peng et al. 2023): pairs that rotate fewer than
    `beta_slow` times within `original_max_position` are slowed down by `factor`, pairs that rotate more than
    `beta_fast` times stay, and the ones between are blended; cosines and sines grow by `attention_factor()`.
    Other names: see `inverse_frequencies`.
    """

    factor: float = field(8.0, "how much the longest wavelengths are stretched")
    low_freq_factor: float = field(1.0, "wavelengths over original_max_position / this: stretched")
    high_freq_factor: float = field(
        4.0, "wavelengths under original_max_position / this: kept", range="above low_freq_factor"
    )
    original_max_position: int = field(8192, "context length before stretching, in tokens")
    beta_fast: float = field(
        32.0, "yarn: pairs that rotate more often in that context stay", range="at least beta_slow"
    )
    beta_slow: float = field(1.0, "yarn: pairs that rotate less often in that context are slowed")
    mscale: float | None = field(None, "yarn: growth of cosines and sines; with mscale_all_dim")
    mscale_all_dim: float | None = field(
        None,
        "yarn: growth that mscale is relative to; latent attention multiplies its scores by its square",
    )
    attention_factor: float | None = field(
        None, "yarn: factor of cosines and sines; empty: from mscale, or 0.1 ln factor + 1"
    )
    truncate: bool = field(True, "yarn: the boundaries of the blended pairs are whole numbers")
    name: str = field(
        "llama3",
        "rule of the wavelengths: llama3, linear, yarn, an entry point of forge.rope_scalings, or module:attr",
    )
    options: dict[str, Any] = options_field("scaling")

    def __post_init__(self) -> None:
        raise_problems("rope_scaling", _scaling_problems(self))


def _scaling_problems(c: RopeScaling) -> Iterator[Problem]:
    if not (_config.is_finite(c.factor) and c.factor >= 1.0):
        rule, fix = "must be a finite number, at least 1", "use 1 for no scaling, 8 for Llama 3.1"
        yield Problem("factor", "range", c.factor, rule, fix)
    low, high = c.low_freq_factor, c.high_freq_factor
    if not (_config.is_finite(low) and _config.is_finite(high) and 0.0 < low < high):
        rule = f"must be positive and below high_freq_factor {high}"
        yield Problem("low_freq_factor", "range", low, rule, "use 1 and 4")
    yield from _config.size_problems(c, {"original_max_position": 2**31})
    yield from _config.name_problems(c, "name", ROPE_SCALINGS)

    fast, slow = c.beta_fast, c.beta_slow
    if not (_config.is_finite(fast) and _config.is_finite(slow) and 0.0 < slow <= fast):
        rule = f"must be positive and at most beta_fast {fast}"
        yield Problem("beta_slow", "range", slow, rule, "use 1 and 32")
    factors = ("mscale", "mscale_all_dim", "attention_factor")
    yield from _config.number_problems(c, 0, dict.fromkeys(factors, "use 1, or leave it out"))
    yield from _config.switch_problems(c, "truncate")
    if c.mscale is not None and c.mscale_all_dim is None:
        fix = "give that, or attention_factor"
        yield Problem("mscale", "requires", c.mscale, "must go with mscale_all_dim", fix)
    if c.mscale is not None and c.attention_factor is not None:
        value, rule = c.attention_factor, f"takes the place of mscale {c.mscale}"
        yield Problem("attention_factor", "excludes", value, rule, "give one of them")

    readers = {
        **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
        "original_max_position": ("llama3", "yarn"),
        **dict.fromkeys(("beta_fast", "beta_slow", "truncate", *factors), ("yarn",)),
    }
    yield from _config.foreign_keys(c, readers, ROPE_NAMES)


@dataclass(frozen=True)
class MRopeConfig:
    """Rotary positions of three axes (time, row, column), given as (B, 3, S); a text token has one number for all.

    "chunked" (Qwen2-VL): the first `sections[0]` pairs of a head's dims rotate by time, the next `sections[1]` by row,
    the rest by column. "interleaved" (Qwen3-VL): the pairs rotate by time, row and column alternately as far as row
    and column have pairs, and the rest by time.

        MRopeConfig((24, 20, 20)).axes[:5]      # (0, 1, 2, 0, 1)
    """

    sections: tuple[int, ...] = field(
        (24, 20, 20), "pairs of a head's dims for time, row and column: half of the rotated width"
    )
    layout: Literal["chunked", "interleaved"] = field(
        "interleaved", "how the axes share the pairs: chunked (Qwen2-VL), interleaved (Qwen3-VL)"
    )

    def __post_init__(self) -> None:
        raise_problems("mrope", _axes_problems(self))

    def problems(self, rotary_dim: int, mixer: str) -> Iterator[Problem]:
        """Problems of these positions in a model whose `mixer` rotates `rotary_dim` dims of a head."""
        if mixer != "attention":
            rule = f"is read only by mixer 'attention', and mixer is {mixer!r}"
            yield Problem("mrope", "mixer", ..., rule, "remove it")
        elif 2 * sum(self.sections) != rotary_dim:
            rule = f"must sum to half of the rotated width of a head, {rotary_dim} / 2"
            sections = list(self.sections)
            yield Problem("mrope.sections", "sum", sections, rule, "change them, or head_dim")

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of each pair: 0 time, 1 row, 2 column."""
        if self.layout == "chunked":
            return tuple(axis for axis, pairs in enumerate(self.sections) for _ in range(pairs))
        return tuple(
            pair % 3 if pair < 3 * self.sections[pair % 3] else 0
            for pair in range(sum(self.sections))
        )

    def by_pair(self, positions: Tensor) -> Tensor:
        """Position of each pair: (B, 3, S) -> (B, S, D / 2)."""
        # made on the device it would let the host wait
        axes = torch.tensor(self.axes).to(positions.device, non_blocking=True)
        return positions.index_select(1, axes).transpose(1, 2)


def _axes_problems(c: MRopeConfig) -> Iterator[Problem]:
    sizes = len(c.sections) == 3 and all(_config.is_size(pairs, 2**15) for pairs in c.sections)
    if not sizes:
        rule = "must be three whole numbers, at least 1"
        yield Problem("sections", "range", list(c.sections), rule, "use [24, 20, 20]")
    layout = list(_config.choice_problems(c, "layout", ("chunked", "interleaved")))
    yield from layout
    if not layout and sizes and [c.axes.count(axis) for axis in range(3)] != list(c.sections):
        rule = "must give row and column at most a third of the pairs where they are interleaved"
        fix = "use [24, 20, 20], or layout chunked"
        yield Problem("sections", "interleaved", list(c.sections), rule, fix)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Radians per position of each pair, (D / 2,) fp32, scaled if the config has a scaling.

    A scaling from elsewhere is called as `rule(frequencies, scaling, **scaling.options)` and returns new
    frequencies of the same shape.
    """
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    plain = 1.0 / (theta**exponent)  # (D / 2,)
    if scaling is None:
        return plain
    return ROPE_SCALINGS.find(scaling.name)(plain, scaling, **scaling.options)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Multiply long wavelengths by `factor`, keep short ones, blend between (Llama 3.1): (D / 2,) -> (D / 2,)."""
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # kept by 1, stretched by 0
    fraction = (scaling.original_max_position / wavelength - low) / (high - low)
    fraction = fraction.clamp(0.0, 1.0)
    blended = (1 - fraction) * (plain / scaling.factor) + fraction * plain
    return torch.where(fraction < 1.0, blended, plain)


def _linear(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Multiply all wavelengths by `factor` (position interpolation): (D / 2,) -> (D / 2,)."""
    return plain / scaling.factor


def _yarn(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down pairs that rotate rarely, keep fast ones, blend between (YaRN): (D / 2,) -> (D / 2,)."""
    pairs = plain.numel()
    if pairs == 1:  # it rotates once in 2 pi tokens, which no context is shorter than
        return plain

    # The pairs that rotate beta_fast and beta_slow times within the original context, between two pairs as a rule.
    # 0-dim tensors in place of numbers: no host sync. 64 bits, as a boundary may be next to a whole number.
    log_theta = plain[-1].double().log() * (-pairs / (pairs - 1))
    low, high = (
        pairs * math.log(scaling.original_max_position / (times * 2 * math.pi)) / log_theta
        for times in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = low.floor(), high.ceil()
    low, high = low.clamp(min=0), high.clamp(max=2 * pairs - 1)

    width = torch.where(high == low, 0.001, high - low)
    pair = torch.arange(pairs, device=plain.device)
    slowed = ((pair - low) / width).clamp(0.0, 1.0).float()  # (D / 2,)
    return plain / scaling.factor * slowed + plain * (1.0 - slowed)


ROPE_SCALINGS = Registry(
    "model.rope_scaling.name",
    "forge.rope_scalings",
    ("frequencies", "scaling"),
    {"llama3": _llama3, "linear": _linear, "yarn": _yarn},
)
ROPE_NAMES = tuple(ROPE_SCALINGS.built_in)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cosines and sines in YaRN: scores of rotated dims grow by its square (paper, section 3.4).

    It is `attention_factor`, or (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1), or without these
    0.1 ln factor + 1.
    """
    if scaling is None or scaling.name != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return _mscale(scaling.factor, 1.0)
    return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)


def score_factor(scaling: RopeScaling | None) -> float:
    """Factor of all scores of latent attention, of rotated dims or not (DeepSeek-V2)."""
    if scaling is None or scaling.name != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's growth of attention scores with the length of the context, by a fit of the paper (equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines times `factor`, each (B, S, 1, D / 2) fp32, of integer positions (B, S), or of those of
    each pair (B, S, D / 2)."""
    per_pair = positions if positions.dim() == 3 else positions[..., None]
    # fp32: in bf16 positions above 256 would not be distinct
    angles = (per_pair.float() * frequencies).unsqueeze(2)  # (B, S, 1, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x[d], x[d + D / 2]) of x (B, S, H, D) in fp32; result in the dtype of x.

    Tables for a smaller width rotate that many leading dims of a head, and leave the rest.
    """
    cos, sin = tables
    if x.dtype == torch.float64:
        cos, sin = cos.double(), sin.double()
    width = 2 * cos.size(-1)
    if width < x.size(-1):
        return torch.cat([rotate(x[..., :width], tables), x[..., width:]], dim=-1)
    if not torch.is_grad_enabled():  # decoding: an autograd function's own cost counts there
        return _rotate(x, cos, sin, 1.0)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """Rotation whose gradient is the inverse rotation: x is not saved, its halves are not copied.

    Tables that hold a factor scale both.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """Rotate x (B, S, H, D) forward (1.0) or backward (-1.0)."""
    if takes_kernel(x):
        from forge_core.model import rope_kernel  # Triton, which a CPU build lacks

        return rope_kernel.rotate(x, cos, sin, direction)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # (B, S, H, D / 2)
    rotated = (
        torch.addcmul(first * cos, second, sin, value=-direction),
        torch.addcmul(second * cos, first, sin, value=direction),
    )
    # Last comes what makes a new tensor: a conversion to the dtype that is there returns its input,
    # and Dynamo of torch 2.11 then gives the custom function zero gradients.
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)
