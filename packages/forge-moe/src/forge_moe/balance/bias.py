"""Balance without a loss: a bias that makes full experts less likely to be chosen (Wang et al. 2024).

Shapes: E experts.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_moe.balance.scopes import known_groups


def rate_at(rate: float, schedule: str, step: int, total_steps: int) -> float:
    """The bias step at optimizer step `step` of 0..total_steps-1.

    "constant"; "cosine" falls to 0 at the end; "linear_warmup" rises over the first tenth of the run.
    """
    if schedule == "cosine":
        return rate * 0.5 * (1.0 + math.cos(math.pi * min(step / max(total_steps, 1), 1.0)))
    if schedule == "linear_warmup":
        return rate * min((step + 1) / max(math.ceil(0.1 * total_steps), 1), 1.0)
    return rate


def moved_bias(bias: Tensor, counts: Tensor, rate: float, center: bool) -> Tensor:
    """bias (E,) fp32 + rate * sign(mean load - load), optionally with its mean taken off."""
    num = counts.numel()
    moved = bias + rate * torch.sign(
        counts.sum() - counts * num
    )  # integers: no rounding at the mean
    return moved - moved.mean() if center else moved


@torch.no_grad()
def update_expert_bias(
    model: nn.Module,
    step: int,
    total_steps: int,
    groups: Any = None,
    skip: Tensor | None = None,
) -> None:
    """End a step for all MoE layers of `model`: once per optimizer step, after the last backward.

        optimizer.step(); update_expert_bias(model, step, total_steps)

    Moves the biases of layers with `bias_update_rate`, hands the step's counts to layers with
    `aux_scope = "global_batch_lagged"`, and begins the next step's counts. Counts are those of training
    forwards since the last call, without pads, without recomputation, before capacity drops.

    `groups`: the process group of all data ranks (expert-parallel ranks read different data: they are
    among them), or several to reduce over in turn. One all-reduce of int64 per group for all layers
    together, no host sync. ValueError if there are several ranks and no group is given.
    `skip`: 0-dim tensor; 1.0 leaves biases and lagged counts as they are (a step that is masked), and the
    counts of that step are forgotten.
    """
    from forge_moe.layer import MoE

    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return
    counts = [layer.tally.take_step(layer.router.weight.device) for layer in layers]
    together = torch.cat(counts)
    for group in known_groups(groups):
        dist.all_reduce(together, group=group)
    for layer, total in zip(layers, together.split([c.numel() for c in counts])):
        config = layer.config
        bias = layer.router.expert_bias
        if bias is not None and config.bias_update_rate > 0.0:
            rate = rate_at(config.bias_update_rate, config.bias_schedule, step, total_steps)
            _write(bias, moved_bias(bias, total, rate, config.bias_center), skip)
        if layer.lagged_counts is not None:
            _write(layer.lagged_counts, total, skip)


def _write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    target.copy_(value if skip is None else torch.where(skip > 0, target, value))
