"""Rotary position embedding (Su et al. 2021) and the scalings of its wavelengths.

Shapes: B sequences, S tokens, H heads, D width of a head, R rotated dims of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rotate = Callable[[Tensor], Tensor]  # (B, S, H, D) -> the same, rotated by the positions


def llama3_scaling(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, blend those between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original_max_position"] * frequencies / (2 * math.pi)  # in that context
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def yarn_scaling(frequencies: Tensor, scaling: dict[str, Any], theta: float) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2), with the boundaries that transformers computes."""
    dim = 2 * len(frequencies)

    def pair_of(periods: float) -> float:  # the pair that turns so often in the original context
        wavelength = scaling["original_max_position"] / (periods * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by 0

    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype)
    slowed = ((pairs - low) / (high - low)).clamp(0, 1)
    return slowed * frequencies / scaling["factor"] + (1 - slowed) * frequencies


def yarn_growth(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1, YaRN's temperature as DeepSeek generalizes it."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """Return the factor of cosines and sines."""
    if scaling["attention_factor"] is not None:
        return scaling["attention_factor"]
    factor, mscale, all_dim = scaling["factor"], scaling["mscale"], scaling["mscale_all_dim"]
    if mscale and all_dim:
        return yarn_growth(factor, mscale) / yarn_growth(factor, all_dim)
    return yarn_growth(factor, 1.0)


def rotary_frequencies(
    dim: int, theta: float, scaling: dict[str, Any] | None, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the frequencies (dim / 2,) of the pairs, and the factor of cosines and sines."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=dtype) / dim)
    if scaling is None:
        return frequencies, 1.0
    if scaling["name"] == "linear":
        return frequencies / scaling["factor"], 1.0
    if scaling["name"] == "llama3":
        return llama3_scaling(frequencies, scaling), 1.0
    return yarn_scaling(frequencies, scaling, theta), yarn_attention_factor(scaling)


def rotate(x: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate the first 2 P dims of each head; dim p and dim p + P are a pair (GPT-NeoX).

    x is (B, S, H, D), angles (B, S, P).
    """
    cos, sin = factor * angles.cos()[:, :, None], factor * angles.sin()[:, :, None]
    pairs = angles.size(-1)
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def no_rotation(x: Tensor) -> Tensor:
    """Layers without rotary positions (NoPE)."""
    return x


def axes_of_pairs(axes: dict[str, Any]) -> list[int]:
    """Return for each pair the axis that rotates it: 0 time, 1 row, 2 column.

    chunked (Qwen2-VL): pairs of time, then of rows, then of columns. interleaved (Qwen3-VL): every third pair from 1 is
    of rows, every third from 2 of columns, as many as their sections; the others are of time.
    """
    sections = axes["sections"]
    if axes["layout"] == "chunked":
        return [axis for axis in range(3) for _ in range(sections[axis])]
    found = [0] * sum(sections)
    for axis in (1, 2):
        for number in range(sections[axis]):
            found[axis + 3 * number] = axis
    return found


def make_rotate(
    positions: Tensor,
    dim: int,
    theta: float,
    scaling: dict[str, Any] | None,
    dtype: torch.dtype,
    axes: dict[str, Any] | None = None,
) -> Rotate:
    """Return the rotation by `positions` (B, S) of the first `dim` dims of each head.

    Positions (B, 3, S) are shared among the pairs as `axes`, the table [model.mrope], says.
    """
    if dim == 0:
        return no_rotation
    frequencies, factor = rotary_frequencies(dim, theta, scaling, dtype)
    if axes is None:
        angles = positions[:, :, None] * frequencies
    else:
        angles = positions[:, axes_of_pairs(axes)].transpose(1, 2) * frequencies
    return lambda x: rotate(x, angles, factor)
