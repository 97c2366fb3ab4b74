"""Deterministic top-k: exact ties go to the lower id, on every device.

Shapes: T tokens, E experts, G groups, K chosen.
"""

import torch
from torch import Tensor


def top_k_ids(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, best first: (T, E) -> (T, K) int64. No autograd, no host sync.

    `torch.topk` does not define the order of equal values, so a CPU and a GPU, or two shapes of a batch,
    may route the same token differently. Here the id is part of the sort key.
    """
    scores = scores.detach()
    if scores.dtype == torch.float64:  # 64 bits leave no room for the id
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    # Bits of positive floats sort as integers; those of negative ones sort in reverse, so flip all but the sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    num = scores.size(-1)
    lower_first = torch.arange(num - 1, -1, -1, device=scores.device)
    key = ordered.to(torch.int64) * num + lower_first  # (T, E), all different
    return key.topk(k, dim=-1).indices


def within_best_groups(
    scores: Tensor, num_groups: int, top_groups: int, group_score: str
) -> Tensor:
    """Scores (T, E) with -inf outside the `top_groups` best groups of each token (DeepSeek-V3, 2.1.2).

    A group is E / G neighboring experts; its score is the sum of its two best ("top2_sum", V3) or its
    best ("max", V2).
    """
    if top_groups == num_groups:
        return scores
    grouped = scores.unflatten(-1, (num_groups, -1))  # (T, G, E / G)
    if group_score == "max" or grouped.size(-1) == 1:
        strength = grouped.amax(-1)
    else:
        strength = grouped.topk(2, dim=-1).values.sum(-1)  # (T, G)
    best = top_k_ids(strength, top_groups)  # (T, top_groups)
    outside = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
