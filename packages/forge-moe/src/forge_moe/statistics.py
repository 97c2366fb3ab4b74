"""What a router did, as tensors: load, dead experts, drops, tokens per rank, co-activation.

Everything stays on the device of its inputs; nothing waits for the device until the caller reads a
value. Costs are those of a few elementwise passes over (T, K) or (T, E).

Shapes: T tokens, K slots per token, E experts, W ranks. Ids are int64 in 0..E; E means "nowhere"
(a pad or a dropped slot).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_moe.balance.losses import count_ids


class LoadSummary(NamedTuple):
    """How evenly `counts` (E,) spread, each a 0-dim tensor.

    max_over_mean: the fullest expert over the mean, 1 when even, E when one takes all.
    min_over_mean: the emptiest likewise. entropy: of the shares, over log E, so in 0..1 (1 for E = 1).
    dead: experts without a token, int64. total: tokens times slots that were placed, int64.
    Ratios and entropy of an empty count are those of an even one.
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
    share = torch.where(total > 0, counts.double() / total.clamp(min=1), 1.0 / num_experts)  # (E,)
    entropy = -torch.special.xlogy(share, share).sum()
    return LoadSummary(
        max_over_mean=(share.max() * num_experts).float(),
        min_over_mean=(share.min() * num_experts).float(),
        entropy=(
            entropy / math.log(num_experts) if num_experts > 1 else torch.ones_like(entropy)
        ).float(),
        dead=(counts == 0).sum(),
        total=total,
    )


def expert_counts(ids: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen: ids (T, K) -> (E,) int64; "nowhere" is not counted."""
    return count_ids(ids, num_experts)


def tokens_per_rank(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Tokens that each of W ranks receives: ids (T, K) -> (W,) int64.

    Ranks own equal contiguous ranges of experts, as `expert_parallelize` deals them. A token with
    several experts on one rank counts once there, as it travels once. Raises ValueError if E is not
    divisible by W.
    """
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts {num_experts} must be divisible by num_ranks {num_ranks}; "
            "use a divisor of num_experts"
        )
    rank = ids.div(num_experts // num_ranks, rounding_mode="floor")  # (T, K), W for nowhere
    reached = ids.new_zeros(ids.size(0), num_ranks + 1)
    reached.scatter_(1, rank, torch.ones_like(rank))  # (T, W + 1)
    return reached[:, :num_ranks].sum(0)


def coactivation(ids: Tensor, num_experts: int) -> Tensor:
    """How many tokens chose both experts: ids (T, K) -> (E, E) int64, symmetric.

    The diagonal counts the tokens of each expert. Memory: K integers per slot and E^2.
    """
    side = num_experts + 1
    pairs = (ids.unsqueeze(2) * side + ids.unsqueeze(1)).flatten()  # (T * K * K,)
    table = ids.new_zeros(side * side).scatter_add_(0, pairs, torch.ones_like(pairs))
    return table.view(side, side)[:num_experts, :num_experts]


def drop_rate(found: Mapping[str, Tensor]) -> Tensor:
    """Part of the chosen slots that a capacity dropped, of a layer's `statistics()`; 0-dim fp32.

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
