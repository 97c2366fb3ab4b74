"""Over which tokens the balance loss counts: the shares f of each scope.

Shapes: T tokens, K slots per token, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._torch_compat import inside_backward
from forge_moe.balance.losses import count_ids, count_ids_per_segment, fractions, segments_of
from forge_moe.balance.spread import Spread
from forge_moe.replay import replaying


def sequence_shares(
    ids: Tensor, rows: int, documents: Tensor | None, num_experts: int, spread: Spread
) -> Tensor:
    """Shares in each token's own sequence: ids (T, K) of `rows` rows one after another -> (T, E).

    A sequence is a row, or a run of equal ids in `documents` (rows, T / rows). Where rows are spread over
    ranks: without documents one all-reduce of (rows, E) integers; with them an all-gather of ids (T, K) in
    int32 and, once per forward, of documents; a document is then an id within its row.
    """
    length = ids.size(0) // max(rows, 1)
    if documents is not None and spread.groups:
        seen = spread.documents(documents.to(ids.device, non_blocking=True).view(rows, length))
        others = spread.gather(ids.int()).long()
        counts = count_ids_per_segment(others, seen.everywhere, seen.most, num_experts)
        return fractions(counts).index_select(0, seen.here)
    segments, at_most = segments_of(rows, length, documents, ids.device)
    counts = count_ids_per_segment(ids, segments, at_most, num_experts)
    return fractions(spread.sum(counts)).index_select(0, segments)


def micro_batch_shares(ids: Tensor, num_experts: int, spread: Spread) -> Tensor:
    """Shares among the tokens of this micro-batch: (T, K) -> (E,).

    One all-reduce of E integers where rows are spread over ranks.
    """
    return fractions(spread.sum(count_ids(ids, num_experts)))


def global_batch_counts(ids: Tensor, num_experts: int, group: Any, spread: Spread) -> Tensor:
    """Choices (E,) int64 of this micro-batch over all data ranks, and ranks that hold parts of its rows.

    One all-reduce of E integers per group. Raises RuntimeError in a recomputation without recorded
    shares: the step has gone on since.
    """
    if inside_backward() and not replaying():
        raise RuntimeError(
            "aux_scope 'global_batch' must be recomputed with the shares of its forward; "
            "give checkpoint(..., context_fn=forge_moe.recompute_contexts)"
        )
    counts = spread.sum(count_ids(ids, num_experts))
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
