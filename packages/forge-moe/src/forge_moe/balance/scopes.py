"""Scopes of the balance loss: the shares f of experts among the tokens of each scope.

Shapes: T tokens, K slots per token, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import inside_backward
from forge_moe.balance.losses import count_ids, count_ids_per_segment, fractions, segments_of
from forge_moe.balance.sequence_group import SequenceGroup
from forge_moe.replay import replaying


def sequence_shares(
    ids: Tensor, rows: int, documents: Tensor | None, num_experts: int, group: SequenceGroup
) -> Tensor:
    """Shares in each token's own sequence: ids (T, K) of `rows` rows one after another -> (T, E).

    A sequence is a row, or a run of equal ids in `documents` (rows, T / rows). If rows are split over ranks:
    without documents one all-reduce of (rows, E) integers; with them an all-gather of ids (T, K) in int32
    and, once per forward, of documents; a document is then an id within its row.
    """
    length = ids.size(0) // max(rows, 1)
    if documents is not None and group.groups:
        # A document may begin on one rank and end on another: counts per document need all ranks' ids.
        found = group.documents(documents.to(ids.device, non_blocking=True).view(rows, length))
        all_ids = group.gather(ids.int()).long()
        counts = count_ids_per_segment(all_ids, found.all_ranks, found.num_segments, num_experts)
        return fractions(counts).index_select(0, found.this_rank)
    segments, num_segments = segments_of(rows, length, documents, ids.device)
    counts = count_ids_per_segment(ids, segments, num_segments, num_experts)
    return fractions(group.sum(counts)).index_select(0, segments)


def micro_batch_shares(ids: Tensor, num_experts: int, group: SequenceGroup) -> Tensor:
    """Shares among the tokens of this micro-batch: (T, K) -> (E,).

    One all-reduce of E integers if rows are split over ranks.
    """
    return fractions(group.sum(count_ids(ids, num_experts)))


def global_batch_counts(
    ids: Tensor, num_experts: int, data_groups: Any, group: SequenceGroup
) -> Tensor:
    """Choices (E,) int64 of this micro-batch over all data ranks, and ranks that hold parts of its rows.

    One all-reduce of E integers per group. Raises RuntimeError in a recomputation without recorded
    shares: later micro-batches have changed the sums by then.
    """
    if inside_backward() and not replaying():
        raise RuntimeError(
            "aux_scope 'global_batch' must be recomputed with the shares of its forward; "
            "give checkpoint(..., context_fn=forge_moe.recompute_contexts)"
        )
    counts = group.sum(count_ids(ids, num_experts))
    for data_group in reduction_groups(data_groups):
        dist.all_reduce(counts, group=data_group)
    return counts


def lagged_shares(counts: Tensor) -> Tensor:
    """Shares in the last step's counts (E,); even ones before the first step has ended."""
    even = torch.full_like(counts, 1.0 / counts.numel(), dtype=torch.float32)
    return torch.where(counts.sum() > 0, fractions(counts), even)


def reduction_groups(groups: Any) -> tuple[Any, ...]:
    """Process groups to reduce over one after the other, from a group, a sequence of groups, or None.

    None is legal on one process only and raises ValueError on more: local counts would give each rank
    another bias. `()` reduces over no group.
    """
    if groups is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            rule = f"must be given in a job of {dist.get_world_size()} ranks, to sum the counts"
            fix = "give the data-parallel groups, or () to sum nothing"
            raise invalid("groups", "missing", groups, rule, fix)
        return ()
    return tuple(groups) if isinstance(groups, tuple | list) else (groups,)
