"""Expert capacity: a bound on the rows of an expert, counted over all slots together.

Shapes: T tokens, K slots per token, E experts.
"""

import math

import torch
from torch import Tensor


def row_limit(
    num_tokens: int | Tensor, top_k: int, num_experts: int, factor: float
) -> int | Tensor:
    """ceil(factor T K / E), the factor taken as the decimal it looks like. num_tokens, without pads, may be a tensor on a device, and then so is the limit."""
    per_token = top_k * factor / num_experts * (1 - 1e-9)  # 1.1 is a little more than 11 / 10
    if isinstance(num_tokens, int):
        return math.ceil(num_tokens * per_token)
    return (num_tokens.double() * per_token).ceil().to(torch.int64)


def drop_over_capacity(
    ids: Tensor, weights: Tensor, num_experts: int, limit: int | Tensor, policy: str
) -> Tensor:
    """ids (T, K) with E, "nowhere", for slots over the limit of their expert. No gradient, no host sync.

    policy "position" keeps earlier tokens (GShard), "probability" those with larger weights (T, K); equal
    ones by position. Dropped slots are neither computed nor sent, and the weights of the others are not
    raised. Tokens of this process alone are counted, so under expert parallelism the limit holds per
    sending process.
    """
    flat = ids.reshape(-1)
    if policy == "probability":
        first = weights.detach().reshape(-1).sort(stable=True, descending=True).indices
        ranked, order = flat[first].sort(stable=True)
        order = first[order]
    else:
        ranked, order = flat.sort(stable=True)  # slots of an expert, the favoured ones first
    begins = torch.searchsorted(ranked, ranked)  # where the slot's expert begins
    place = torch.arange(flat.numel(), device=ids.device) - begins
    kept = torch.where(place < limit, ranked, num_experts)
    return torch.empty_like(flat).scatter_(0, order, kept).view(ids.shape)
