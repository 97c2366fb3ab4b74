"""Over which tokens the balance loss counts: the shares f of each scope.

Shapes: T tokens, K slots per token, E experts, G segments.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._torch_compat import inside_backward
from forge_moe.balance.losses import count_ids, count_ids_per_segment, fractions
from forge_moe.replay import replaying


def sequence_shares(
    ids: Tensor, segments: Tensor, num_segments: int, num_experts: int, group: Any
) -> Tensor:
    """Shares in each token's own sequence: ids (T, K), segments (T,) -> (T, E).

    `group`: ranks that hold other tokens of the same sequences (context parallelism); one all-reduce of
    (G, E) integers. Without it nothing is communicated.
    """
    counts = count_ids_per_segment(ids, segments, num_segments, num_experts)
    if group is not None:
        counts = counts.contiguous()
        dist.all_reduce(counts, group=group)
    return fractions(counts).index_select(0, segments)


def micro_batch_shares(ids: Tensor, num_experts: int) -> Tensor:
    """Shares among the tokens of this call: (T, K) -> (E,)."""
    return fractions(count_ids(ids, num_experts))


def global_batch_counts(ids: Tensor, num_experts: int, group: Any) -> Tensor:
    """Choices (E,) int64 of this micro-batch over all data ranks: one all-reduce of E integers.

    Raises RuntimeError in a recomputation without recorded shares: the step has gone on since.
    """
    if inside_backward() and not replaying():
        raise RuntimeError(
            "aux_scope 'global_batch' must be recomputed with the shares of its forward; "
            "give checkpoint(..., context_fn=forge_moe.recompute_contexts)"
        )
    counts = count_ids(ids, num_experts)
    for each in known_groups(group):
        dist.all_reduce(counts, group=each)
    return counts


def lagged_shares(counts: Tensor) -> Tensor:
    """Shares in the last step's counts (E,); even ones before there are any."""
    even = torch.full_like(counts, 1.0 / counts.numel(), dtype=torch.float32)
    return torch.where(counts.sum() > 0, fractions(counts), even)


def known_groups(groups: Any) -> tuple[Any, ...]:
    """Process groups to reduce over one after the other, from a group, a sequence of them, or None.

    None is right for one process; ValueError if there are more, since counts that stay local make biases
    that differ by rank. `()` says that nothing is to be reduced.
    """
    if groups is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"counts must be summed over the data ranks, and no group is given in a job of "
                f"{dist.get_world_size()} ranks; give the data-parallel groups, or () to sum nothing"
            )
        return ()
    return tuple(groups) if isinstance(groups, tuple | list) else (groups,)
