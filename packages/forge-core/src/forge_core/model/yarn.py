"""YaRN (Peng et al. 2023): rotary wavelengths for contexts longer than those of training.

Shapes: D width that rotary embedding turns, of which there are D / 2 pairs.
"""

import math

import torch
from torch import Tensor

from forge_core.model.config import RopeScaling


def yarn(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Radians per position (D / 2,) fp32 from those without scaling.

    A pair that turns at least `beta_fast` times within the original context is kept, one that turns at most
    `beta_slow` times is slowed down by `factor`, and those between are blended.
    """
    pairs = plain.numel()
    if pairs == 1:  # it turns once in 2 pi tokens, which no context is shorter than
        return plain
    # 0-dim tensors in place of numbers: no host sync. 64 bits, as a border may be next to a whole number
    log_theta = plain[-1].double().log() * (-pairs / (pairs - 1))
    low, high = (
        pairs * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / log_theta
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )  # the pairs that turn so often, between two of them as a rule
    if scaling.truncate:
        low, high = low.floor(), high.ceil()
    low, high = low.clamp(min=0), high.clamp(max=2 * pairs - 1)
    width = torch.where(high == low, 0.001, high - low)
    pair = torch.arange(pairs, device=plain.device)
    stretched = ((pair - low) / width).clamp(0.0, 1.0).float()  # (D / 2,)
    return plain / scaling.factor * stretched + plain * (1.0 - stretched)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by: scores of turned dims grow by its square (paper, 3.4)."""
    if scaling is None or scaling.name != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return _growth(scaling.factor, 1.0)
    return _growth(scaling.factor, scaling.mscale) / _growth(scaling.factor, scaling.mscale_all_dim)


def score_factor(scaling: RopeScaling | None) -> float:
    """What latent attention multiplies all its scores by, turned dims or not (DeepSeek-V2)."""
    if scaling is None or scaling.name != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _growth(scaling.factor, scaling.mscale_all_dim) ** 2


def _growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
