"""Router losses as functions of a router's choices and probabilities.

Shapes: T tokens, K slots per token, E experts, G segments (sequences or documents).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AuxLosses(NamedTuple):
    """0-dim fp32 tensors, multiplied by their weights; total is the sum of the other three."""

    total: Tensor
    balance: Tensor
    z: Tensor
    sequence: Tensor

    @staticmethod
    def of(balance: Tensor, z: Tensor, sequence: Tensor) -> "AuxLosses":
        """With the total."""
        return AuxLosses(balance + z + sequence, balance, z, sequence)


def count_ids(ids: Tensor, num_experts: int) -> Tensor:
    """Number of choices of each expert: ids (T, K) in 0..E -> (E,) int64; "nowhere" is not counted."""
    flat = ids.reshape(-1)
    return _scatter_ones(flat, num_experts + 1)[:num_experts]


def count_ids_per_segment(
    ids: Tensor, segments: Tensor, num_segments: int, num_experts: int
) -> Tensor:
    """The same for each segment: ids (T, K), segments (T,) in 0..G-1 -> (G, E) int64."""
    columns = num_experts + 1  # the last one counts "nowhere"
    flat = (segments.unsqueeze(1) * columns + ids).reshape(-1)
    table = _scatter_ones(flat, num_segments * columns).view(num_segments, columns)
    return table[:, :num_experts]


def _scatter_ones(index: Tensor, size: int) -> Tensor:
    # Integer sums do not depend on their order; bincount would sync with the host.
    return index.new_zeros(size).scatter_add_(0, index, torch.ones_like(index))


def fractions(counts: Tensor) -> Tensor:
    """Share of each expert in counts (..., E) as fp32; rows without a count are 0."""
    return counts.float() / counts.sum(dim=-1, keepdim=True).clamp_min(1)


def balance_loss(
    shares: Tensor,
    probabilities: Tensor,
    valid: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """E / T sum_t sum_e f_e P_te: 1 for an even load, up to E when one expert takes all (Switch, eq. 4).

    shares f: (E,), or (T, E) with those of each token's own sequence; constants. probabilities P (T, E) with
    a gradient. Tokens with valid (T,) False do not count. With `total`, the 0-dim number of tokens on all
    ranks that share rows, the result is this rank's part of the mean over those tokens: the ranks' results
    add up. The loss is linear in P: with equal f, the mean over ranks or micro-batches, weighted by tokens,
    is the loss of all their tokens.

    With the shares of each sequence it is DeepSeek-V3's loss per sequence (eq. 17-20), averaged over
    sequences by length. `transformers` sums over slots where this averages: its value is K times this one.
    """
    per_token = torch.linalg.vecdot(probabilities, shares.expand_as(probabilities))  # (T,)
    return probabilities.size(1) * _mean(per_token, valid, total)


def z_loss(logits: Tensor, valid: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits (T, E)) squared (ST-MoE, eq. 5); `total` as above."""
    return _mean(logits.logsumexp(dim=-1).square(), valid, total)


def _mean(values: Tensor, valid: Tensor | None, total: Tensor | None) -> Tensor:
    if valid is None and total is None:
        return values.sum() / max(values.numel(), 1)
    if valid is not None:
        values, total = values.masked_fill(~valid, 0.0), valid.sum() if total is None else total
    assert total is not None
    return values.sum() / total.clamp_min(1)


def segments_of(
    rows: int, length: int, document_ids: Tensor | None, device: torch.device
) -> tuple[Tensor, int]:
    """(segment of each of T = rows x length tokens, upper bound G on the number of segments).

    Without document_ids a segment is a row; with them (rows, length) it is a run of equal ids in a row. G is
    then T, as the exact number would cost a host sync; most segments are empty.
    """
    if document_ids is None:
        return torch.arange(rows, device=device).repeat_interleave(length), rows
    ids = document_ids.to(device, non_blocking=True).view(rows, length)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins.view(-1).cumsum(0) - 1, rows * length
