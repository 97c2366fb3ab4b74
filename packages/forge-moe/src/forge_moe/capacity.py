"""Expert capacity: a bound on the rows of an expert, counted over all slots of a call.

Shapes: T tokens, K slots per token, E experts.
"""

import math

import torch
from torch import Tensor


def row_limit(
    num_tokens: int | Tensor, top_k: int, num_experts: int, factor: float
) -> int | Tensor:
    """ceil(factor T K / E), with the factor as the decimal that its digits show.

    num_tokens, without pads, may be a tensor on a device; the limit then is one too.
    """
    # 1.1 is stored as a little more than 11 / 10, and ceil would add a row: shrink by more than rounding.
    per_token = top_k * factor / num_experts * (1 - 1e-9)
    if isinstance(num_tokens, int):
        return math.ceil(num_tokens * per_token)
    return (num_tokens.double() * per_token).ceil().to(torch.int64)


def drop_over_capacity(
    ids: Tensor, weights: Tensor, num_experts: int, limit: int | Tensor, policy: str
) -> Tensor:
    """ids (T, K) with E, "nowhere", for slots over the limit of their expert. No gradient, no host sync.

    policy "position" keeps earlier tokens (GShard), "probability" those with larger weights (T, K); equal
    ones by position. Dropped slots are neither computed nor sent, and the weights of the others are not
    raised. Only tokens of this process are counted, so under expert parallelism the limit holds per
    sending process.
    """
    flat = ids.reshape(-1)
    if policy == "probability":
        by_weight = weights.detach().reshape(-1).sort(stable=True, descending=True).indices
        sorted_ids, order = flat[by_weight].sort(stable=True)
        order = by_weight[order]
    else:
        sorted_ids, order = flat.sort(stable=True)
    # Stable sorts: within an expert the slots to keep come first, so a slot's index counts from its expert.
    first_of_expert = torch.searchsorted(sorted_ids, sorted_ids)
    index = torch.arange(flat.numel(), device=ids.device) - first_of_expert
    kept = torch.where(index < limit, sorted_ids, num_experts)
    return torch.empty_like(flat).scatter_(0, order, kept).view(ids.shape)
