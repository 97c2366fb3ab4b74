"""Rotary position embedding (Su et al. 2021) in the half-rotation layout of Hugging Face's Llama.

Tables are computed from positions in each forward, never stored: a model built on the meta device
has no buffer that could stay uninitialised. Shapes: B rows, S tokens, H heads, D width of a head.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.model.config import RopeScaling
from forge_core.model.yarn import yarn
from forge_core.registry import Registry


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
    scaled: Tensor = ROPE_SCALINGS.find(scaling.name)(plain, scaling, **scaling.options)
    return scaled


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    length = scaling.original_max_position
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)  # 1: keep, 0: stretch
    return torch.where(share < 1.0, (1 - share) * (plain / scaling.factor) + share * plain, plain)


def _linear(plain: Tensor, scaling: RopeScaling) -> Tensor:
    return plain / scaling.factor


ROPE_SCALINGS = Registry(
    "model.rope_scaling.name",
    "forge.rope_scalings",
    ("frequencies", "scaling"),
    {"llama3": _llama3, "linear": _linear, "yarn": yarn},
)


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines times `factor`, each (B, S, 1, D / 2) fp32, of integer positions (B, S), or of those of
    each pair (B, S, D / 2)."""
    per_pair = positions if positions.dim() == 3 else positions[..., None]
    angles = (per_pair.float() * frequencies).unsqueeze(2)  # (B, S, 1, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # (B, S, H, D / 2)
    turned = (
        torch.addcmul(first * cos, second, sin, value=-direction),
        torch.addcmul(second * cos, first, sin, value=direction),
    )
    # Last comes what makes a new tensor: a conversion to the dtype that is there returns its input,
    # and Dynamo of torch 2.11 then gives the custom function zero gradients.
    return torch.cat([part.to(x.dtype) for part in turned], dim=-1)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation: x is not saved, its halves are not copied.

    Tables that hold a factor scale both.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x[d], x[d + D / 2]) of x (B, S, H, D) in fp32; result in the dtype of x.

    Tables for a smaller width turn that many leading dims of a head, and leave the rest.
    """
    cos, sin = tables
    if x.dtype == torch.float64:
        cos, sin = cos.double(), sin.double()
    width = 2 * cos.size(-1)
    if width < x.size(-1):
        return torch.cat([_rotated(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    return _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # decoding: an autograd function's own cost counts there
        return _turn(x, cos, sin, 1.0)
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out
