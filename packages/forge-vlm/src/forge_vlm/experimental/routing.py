"""Group tokens by modality, and choose the experts of each token in its group.

Shapes: B sequences, S tokens, N = B S, G groups, n tokens of a group, E experts of it, K experts of a token, C tokens of an
expert, D any width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forge_core import TokenContext

__all__ = [
    "NOWHERE",
    "Quotas",
    "Routes",
    "expert_choice",
    "gumbel_difference",
    "quotas_of",
    "routes_of",
    "token_choice",
]

NOWHERE = -1  # the group of what no group sees


@dataclass(frozen=True)
class Routes:
    """Tokens by group. `order` (N,) lists tokens of group 0, then 1, ..., last those of no group, each in the order of
    the batch; `back` (N,) is its inverse; `sizes` are the G numbers. Without an order all tokens are of group 0.
    """

    order: Tensor | None
    back: Tensor | None
    sizes: tuple[int, ...]

    def split(self, tokens: Tensor) -> list[Tensor]:
        """Rows of each group, (n, D) each, of tokens (N, D)."""
        if self.order is None:
            return [tokens, *(tokens[:0] for _ in self.sizes[1:])]
        inside = self.order[: sum(self.sizes)]
        return list(tokens.index_select(0, inside).split(self.sizes))

    def join(self, parts: list[Tensor]) -> Tensor:
        """Tokens (N, D) of the rows of each group; zeros where a token is of no group.

        Groups without rows are part of the graph, so that their parameters have gradients of zero.
        """
        joined = torch.cat(parts)
        if self.back is None:
            return joined
        outside = len(self.back) - len(joined)
        if outside:
            joined = torch.cat((joined, joined.new_zeros(outside, joined.size(1))))
        return joined.index_select(0, self.back)


def routes_of(ctx: TokenContext, groups: tuple[int, ...]) -> Routes:
    """The routes of a batch, `groups[m + 1]` being the group of modality m (-1, padding, stands first).

    Computed on the host once per forward, and copied to the device of the ids. Where `ctx.modality_ids` lie on an
    accelerator that costs the one host sync of all layers; on the CPU no sync happens. Without ids all is text.
    """
    ids = ctx.modality_ids
    num = max(groups) + 1
    if ids is None:
        return Routes(None, None, (0,) * num)
    return ctx.once(("modality routes", groups), lambda: _routes(ids, groups, num))


def _routes(ids: Tensor, groups: tuple[int, ...], num: int) -> Routes:
    group = torch.tensor(groups)[ids.flatten().cpu() + 1]  # (N,)
    sizes = tuple(int((group == g).sum()) for g in range(num))
    if sizes[0] == len(group):
        return Routes(None, None, sizes)
    order = group.masked_fill(group == NOWHERE, num).argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    device = ids.device
    return Routes(order.to(device, non_blocking=True), back.to(device, non_blocking=True), sizes)


def token_choice(probabilities: Tensor, top_k: int) -> Tensor:
    """The experts of each token with the largest of its probabilities (n, E), equal ones by number: (n, K)."""
    ids = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
    return ids[:, :top_k]


class Quotas(NamedTuple):
    """Where experts choose: `sequences` (n,) numbers each token's sequence, rising; `kept` (C,) are the places that an
    expert takes once the tokens of each sequence are sorted by it."""

    sequences: Tensor
    kept: Tensor

    def to(self, device: torch.device) -> Quotas:
        """The same on another device, without a sync."""
        return Quotas(*(t.to(device, non_blocking=True) for t in self))


def quotas_of(
    ctx: TokenContext, shape: torch.Size, places: Tensor, scope: str, factor: float, num: int
) -> Quotas:
    """The quotas of a group's `num` experts, on the host: ceil(factor * n / num) of the n tokens of each document of
    each sequence ("sequence") or of the batch ("micro_batch"), at most n. `places` (n,) are those of the group's tokens in
    the batch of `shape` (B, S).

    Reads document ids and places, which costs a host sync each where they lie on an accelerator; once per forward.
    """
    rows = places.cpu()
    sequence = torch.zeros_like(rows)
    if scope == "sequence":
        sequence = _sequences(ctx, shape)[rows]
    _, sequence, sizes = sequence.unique_consecutive(return_inverse=True, return_counts=True)
    limits = [min(n, math.ceil(factor * n / num)) for n in sizes.tolist()]
    begins = sizes.cumsum(0) - sizes
    kept = [torch.arange(first, first + limit) for first, limit in zip(begins.tolist(), limits)]
    return Quotas(sequence, torch.cat(kept) if kept else rows)


def _sequences(ctx: TokenContext, shape: torch.Size) -> Tensor:
    """A number for each document of each sequence, rising over the tokens of the batch: (N,)."""
    starts = torch.zeros(shape, dtype=torch.int64)
    starts[:, 0] = 1
    if ctx.document_ids is not None:
        ids = ctx.document_ids.cpu()
        starts[:, 1:] = (ids[:, 1:] != ids[:, :-1]).long()
    return starts.flatten().cumsum(0)


def expert_choice(scores: Tensor, quotas: Quotas) -> Tensor:
    """The tokens that each expert takes, those with its largest scores (n, E) of each sequence: (E, C) int64.

    Equal scores go to the earlier token. No gradient, no host sync.
    """
    by_score = scores.detach().sort(dim=0, descending=True, stable=True).indices  # (n, E)
    by_sequence = quotas.sequences[by_score].argsort(dim=0, stable=True)
    return by_score.gather(0, by_sequence).index_select(0, quotas.kept).mT  # (E, C)


def gumbel_difference(tokens: Tensor, num: int, stream: tuple[int, ...]) -> Tensor:
    """The difference of two standard Gumbel draws for each token and expert, (n, num) fp32: a logistic variate.

    A function of the numbers in `stream` and of each token's place in the batch (n,) int64: the same on every device,
    in a recomputation, and whatever else the batch holds.
    """
    state = torch.zeros_like(tokens)[:, None]  # (n, 1)
    for number in stream:
        state = _mixed(state + number)
    experts = torch.arange(num, device=tokens.device)
    bits = _mixed(_mixed(state + tokens[:, None]) + experts)  # (n, num)
    uniform = ((bits >> 11) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)
    return torch.logit(uniform).float()


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose bits look random (splitmix64; Steele et al. 2014)."""
    x = x + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
