"""Balance without a loss: a bias that makes full experts less likely to be chosen (Wang et al. 2024).

Shapes: E experts.
"""

import math

import torch
from torch import Tensor


def rate_at(rate: float, schedule: str, step: int, total_steps: int) -> float:
    """The rate at optimizer step `step` of 0..total_steps-1.

    "constant"; "cosine" falls to 0 at the end; "linear_warmup" rises over the first tenth of the run.
    """
    if schedule == "cosine":
        return rate * 0.5 * (1.0 + math.cos(math.pi * min(step / max(total_steps, 1), 1.0)))
    if schedule == "linear_warmup":
        return rate * min((step + 1) / max(math.ceil(0.1 * total_steps), 1), 1.0)
    return rate


def moved_bias(bias: Tensor, counts: Tensor, rate: float, center: bool) -> Tensor:
    """bias (E,) fp32 + rate * sign(mean load - load), with its mean subtracted if `center`."""
    num = counts.numel()
    # mean - load, times E: integers, so an expert exactly at the mean gets sign 0.
    moved = bias + rate * torch.sign(counts.sum() - counts * num)
    return moved - moved.mean() if center else moved
