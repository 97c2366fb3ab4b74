"""Statistics of routing, as tensors: load, dead experts, drops, co-activation.

Results stay on the device of their inputs; the host waits only when the caller reads a value.

Shapes: T tokens, K slots per token, E experts. Ids are int64 in 0..E; E means "nowhere" (a pad or a
dropped slot).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["LoadSummary", "coactivation", "collect", "drop_rate", "load_summary"]


class LoadSummary(NamedTuple):
    """Balance of `counts` (E,), each field a 0-dim tensor.

    max_over_mean: the fullest expert over the mean, 1 when even, E when one takes all.
    min_over_mean: the emptiest expert over the mean. entropy: of the fractions, over log E, so in 0..1 (1 for E = 1).
    dead: experts without a token, int64. total: sum of the counts, int64.
    Ratios and entropy of all-zero counts are those of even ones.
    """

    max_over_mean: Tensor
    min_over_mean: Tensor
    entropy: Tensor
    dead: Tensor
    total: Tensor


def load_summary(counts: Tensor) -> LoadSummary:
    """Summary of counts (E,) int64.

    load_summary(moe.statistics()["counts"]).max_over_mean
    """
    num_experts, total = counts.numel(), counts.sum()
    even = 1.0 / num_experts
    fractions = torch.where(total > 0, counts.double() / total.clamp(min=1), even)  # (E,)
    entropy = -torch.special.xlogy(fractions, fractions).sum()
    entropy = entropy / math.log(num_experts) if num_experts > 1 else torch.ones_like(entropy)
    return LoadSummary(
        max_over_mean=(fractions.max() * num_experts).float(),
        min_over_mean=(fractions.min() * num_experts).float(),
        entropy=entropy.float(),
        dead=(counts == 0).sum(),
        total=total,
    )


def coactivation(ids: Tensor, num_experts: int) -> Tensor:
    """Number of tokens that chose both experts: ids (T, K) -> (E, E) int64, symmetric.

    The diagonal counts the tokens of each expert. Memory: K integers per slot and E^2.
    """
    side = num_experts + 1
    pairs = (ids.unsqueeze(2) * side + ids.unsqueeze(1)).flatten()  # (T * K * K,)
    table = ids.new_zeros(side * side).scatter_add_(0, pairs, torch.ones_like(pairs))
    return table.view(side, side)[:num_experts, :num_experts]


def drop_rate(found: Mapping[str, Tensor]) -> Tensor:
    """Fraction of the chosen slots that the capacity dropped, from a layer's `statistics()`; 0-dim fp32.

    drop_rate(moe.statistics())
    """
    return found["dropped"].float() / found["counts"].sum().clamp(min=1)


def collect(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """{module name: its statistics()} of every MoE layer below `model`.

    for name, found in collect(model).items(): print(name, load_summary(found["counts"]))
    """
    return {
        name: module.statistics()
        for name, module in model.named_modules()
        if callable(getattr(module, "statistics", None))
    }
