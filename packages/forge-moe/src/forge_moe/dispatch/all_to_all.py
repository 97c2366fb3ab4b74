"""Dispatch among ranks that each hold a slice of the experts: in one step, or between nodes and then within a node.

Shapes: T tokens of this rank, K slots per token, R routed tokens for local experts, D width, E experts, W ranks, C
chunks; V nodes of L ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe._shared.problems import invalid
from forge_moe.dispatch import exchange
from forge_moe.dispatch.exchange import AllToAllPlan, Transit
from forge_moe.dispatch.local import Permutation
from forge_moe.load_balancing import count_ids
from forge_moe.protocols import Dispatched
from forge_moe.replay import record_or_replay


class ChunkedDispatch:
    """`dispatch`, `combine` and `run` of dispatchers between ranks, composed of steps that they define.

    exchange_splits(list of ids (T_c, K)) -> for each chunk (tokens sent, tokens received, rest): one host sync;
    finish_dispatch(started exchange, rest) -> Dispatched; start_combine(rows, meta) starts to send sums back.

    `group`: the ranks of the exchange. Each of its members has `experts_per_member` experts, of its own or of its node.
    """

    exchange_splits: Callable[[Sequence[Tensor]], Sequence[tuple[list[int], list[int], Any]]]
    finish_dispatch: Callable[[Transit, Any], Dispatched]
    start_combine: Callable[[Tensor, Any], Transit]

    def __init__(self, group: dist.ProcessGroup, experts_per_member: int, chunks: int) -> None:
        if chunks < 1:
            raise invalid("chunks", "range", chunks, "must be at least 1", "use 1, or 2 to overlap")
        self.group, self.experts_per_member, self.chunks = group, experts_per_member, chunks

    def start_dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, splits: tuple[list[int], list[int], Any]
    ) -> tuple[Transit, Any]:
        """Start to send the tokens; other work may follow before `finish_dispatch`."""
        sent, received, rest = splits
        plan = AllToAllPlan.of(ids // self.experts_per_member, self.group, sent, received)
        return exchange.start_dispatch(x, weights, ids, plan, self.experts_per_member), rest

    def dispatch(self, x: Tensor, weights: Tensor, ids: Tensor) -> Dispatched:
        """x (T, D), weights (T, K), ids (T, K) -> rows (R, D) by expert, counts (E,), no tail."""
        (splits,) = self._recorded_splits([ids])
        return self.finish_dispatch(*self.start_dispatch(x, weights, ids, splits))

    def combine(self, rows: Tensor, meta: Any) -> Tensor:
        """(T, D) fp32 from the experts' outputs rows (R, D)."""
        return exchange.finish_combine(self.start_combine(rows, meta))

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        overlapped: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """dispatch, `experts(rows, counts, full=True)` and combine: (T, D) fp32; and overlapped().

        The tokens are split into `chunks`. `overlapped` (shared experts) is called during the first transfer; the tokens
        of chunk i + 1 and the sums of chunk i - 1 are in transfer while the experts compute chunk i. Autograd takes the
        steps in reverse, so gradients overlap with the same work. One exchange gives the sizes of all chunks: one host
        sync.

        A token's output does not depend on `chunks`; gradients of experts are summed over chunks. Each chunk costs one
        more of every exchange of tokens and sums and one more call of `experts`, which under FSDP gathers its parameters
        each time unless `reshard_after_forward=False`. torch.compile leaves all of it eager, experts and `overlapped`
        included.
        """
        if torch.compiler.is_compiling():  # a graph can hold neither work handles nor host sizes
            return torch.compiler.disable(self._run)(x, weights, ids, experts, overlapped)
        return self._run(x, weights, ids, experts, overlapped)

    def _run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        overlapped: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        sizes = even_sizes(x.size(0), self.chunks)
        id_chunks = ids.split(sizes)
        splits = self._recorded_splits(id_chunks)
        chunks = list(zip(x.split(sizes), weights.split(sizes), id_chunks, splits))

        started = self.start_dispatch(*chunks[0])
        alongside = overlapped() if overlapped is not None else None
        combining = []
        for following in [*chunks[1:], None]:
            current = started
            if following is not None:  # in transfer while the experts compute the current chunk
                started = self.start_dispatch(*following)
            sent = self.finish_dispatch(*current)
            out = experts(sent.rows, sent.counts, full=True)
            combining.append(self.start_combine(out, sent.meta))

        sums = [exchange.finish_combine(each) for each in combining]
        return sums[0] if len(sums) == 1 else torch.cat(sums), alongside

    def _recorded_splits(self, ids: Sequence[Tensor]) -> Sequence[tuple[list[int], list[int], Any]]:
        # A recomputation reads the sizes of its forward: no second host sync.
        return record_or_replay(self, "splits", lambda: self.exchange_splits(ids))


def even_sizes(total: int, chunks: int) -> list[int]:
    """`chunks` sizes that differ by at most one; some are 0 if there are fewer tokens."""
    return [(total * (i + 1)) // chunks - (total * i) // chunks for i in range(chunks)]


def check_divisible(num_experts: int, ranks: int, where: str = "") -> None:
    """Raise ValueError unless every rank gets the same number of experts."""
    if num_experts % ranks:
        divisors = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        more = -(-num_experts // ranks) * ranks
        rule = f"must be divisible by the {ranks} ranks of the group"
        fix = f"use {more} experts or ep {divisors}"
        raise invalid("num_experts", "divides", num_experts, rule, fix, where=where)


class Splits(NamedTuple):
    """Sizes of an exchange on the host: tokens to and from each rank (W,), and received tokens with more than j slots on
    this rank, for j < K."""

    sent: list[int]
    received: list[int]
    tokens_with_slot: list[int]


class AllToAllDispatch(ChunkedDispatch):
    """Send each token once to every rank of `group` that holds experts of it, and the sums back.

        dispatcher = AllToAllDispatch(mesh["ep"].get_group(), num_experts=64)
        rows, counts, meta = dispatcher.dispatch(x, weights, ids)   # of local experts, from all ranks
        y = dispatcher.combine(experts(rows, counts), meta)         # (T, D), this rank's tokens

    Rank r holds experts r E/W .. (r + 1) E/W - 1. Takes x (T, D), weights (T, K), ids (T, K) int64 in 0..E, E for dropped
    slots; T may differ among ranks and be 0. The weighted outputs of a token's experts on a rank are summed there in
    fp32, rounded once to x's dtype for the transfer, and the partial sums are added in fp32 by rank: with p_r the partial
    sum of rank r and u the unit roundoff of that dtype (2^-8 in bf16), the transfer changes an element of y by at most
    u sum_r |p_r|. Sums have a fixed order: the same bits every time.

    Costs per layer: in the forward three exchanges (K integers per rank pair; tokens with their ids and weights; sums),
    in the backward two; one host sync, for the split sizes, none when recomputed under `recompute_contexts()`. Bytes:
    README, Costs. Every rank of the group makes the same calls in the same order, and whether x and weights need
    gradients is the same on all. Raises ValueError when the ranks do not divide the experts.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, chunks: int = 1) -> None:
        self.ranks = dist.get_world_size(group)
        check_divisible(num_experts, self.ranks)
        super().__init__(group, num_experts // self.ranks, chunks)

    def exchange_splits(self, ids: Sequence[Tensor]) -> list[Splits]:
        """Split sizes of each chunk of ids (T_c, K): one exchange, one host sync."""
        ranks = [chunk // self.experts_per_member for chunk in ids]
        outgoing = torch.stack([exchange.tokens_with_slot(r, self.ranks) for r in ranks])
        incoming = exchange.exchange_counts(outgoing, self.group)  # (C, W, K)
        sizes = exchange.to_host(outgoing[..., 0], incoming[..., 0], incoming.sum(1))
        return [Splits(*of_chunk) for of_chunk in zip(*sizes)]

    def finish_dispatch(self, started: Transit, tokens_with_slot: list[int]) -> Dispatched:
        """Wait for the tokens and sort them by expert, then source rank, then token."""
        x, weights, ids = exchange.finish_dispatch(started)
        order = Permutation.received(ids, self.experts_per_member, tokens_with_slot)
        counts = count_ids(ids, self.experts_per_member)
        return Dispatched(order.permute(x), counts, (started, weights, order))

    def start_combine(self, rows: Tensor, meta: tuple[Transit, Tensor, Permutation]) -> Transit:
        """Sum the experts' outputs of each token and start to send the sums back."""
        dispatched, weights, order = meta
        return exchange.start_combine(order.unpermute(rows, weights), dispatched)


class NodeSplits(NamedTuple):
    """Sizes on the host: tokens to and from each node (V,), and the sizes of the step within the node."""

    sent: list[int]
    received: list[int]
    within: Splits


class HierarchicalDispatch(ChunkedDispatch):
    """All-to-all that crosses the slow network once per token and node (DeepSeek-V3, section 3.2.2).

        dispatcher = HierarchicalDispatch(between, within, num_experts=256)

    `between` holds the ranks with this rank's index in each of the V nodes, `within` the L ranks of this node; rank
    v L + l holds the same experts as in an `AllToAllDispatch` over V L ranks, and the calls are the same. A token is sent
    to the rank of the same index on each node that has experts of it, and from there to the ranks of the node. Partial
    sums of a node are added in fp32 before they leave it. With routing limited to `top_groups` groups, a node to a group,
    a token goes to at most `top_groups` nodes.

    Each step rounds to x's dtype once: to first order in its unit roundoff u an element of y changes by at most
    u (sum |p_r| + sum |q_v|), p_r the partial sums of ranks and q_v those of nodes.

    Costs per layer: in the forward two exchanges of counts, two of tokens, two of sums; in the backward four; one host
    sync. With chunks the exchanges between nodes overlap with the experts, those within a node do not. Raises ValueError
    when the ranks do not divide the experts.
    """

    def __init__(
        self,
        between: dist.ProcessGroup,
        within: dist.ProcessGroup,
        num_experts: int,
        *,
        chunks: int = 1,
    ) -> None:
        self.nodes = dist.get_world_size(between)
        self.ranks = self.nodes * dist.get_world_size(within)
        check_divisible(num_experts, self.ranks)
        super().__init__(between, num_experts // self.nodes, chunks)
        self.node = AllToAllDispatch(within, self.experts_per_member)

    def exchange_splits(self, ids: Sequence[Tensor]) -> list[NodeSplits]:
        """Sizes of both steps for each chunk: two small exchanges, one host sync.

        A rank sends not only the number of tokens for a node but also how many of these each rank of that node will
        get, so the second step's sizes are known before the first token is sent.
        """
        per_node, per_rank = self.experts_per_member, self.node.experts_per_member
        masks = [exchange.token_rank_mask(chunk // per_node, self.nodes) for chunk in ids]
        to_nodes = torch.stack([mask.sum(0) for mask in masks])  # (C, V)
        to_ranks = [exchange.tokens_with_slot(chunk // per_rank, self.ranks) for chunk in ids]
        of_node = torch.stack(to_ranks).unflatten(1, (self.nodes, -1))  # (C, V, L, K)

        outgoing = torch.cat((to_nodes.unsqueeze(2), of_node.flatten(2)), dim=2)
        incoming = exchange.exchange_counts(outgoing, self.group)  # (C, V, 1 + L K)
        forwarded = incoming[..., 1:].sum(1).view(len(ids), self.node.ranks, -1)  # (C, L, K)
        gathered = exchange.exchange_counts(forwarded, self.node.group)

        between = (outgoing[..., 0], incoming[..., 0])
        within = (forwarded[..., 0], gathered[..., 0], gathered.sum(1))
        sizes = zip(*exchange.to_host(*between, *within))
        return [NodeSplits(sent, received, Splits(*rest)) for sent, received, *rest in sizes]

    def finish_dispatch(self, started: Transit, within: Splits) -> Dispatched:
        """Wait for the tokens, send them on within the node, sort them by expert."""
        received = exchange.finish_dispatch(started)
        sent = self.node.finish_dispatch(*self.node.start_dispatch(*received, within))
        return sent._replace(meta=(started, sent.meta))

    def start_combine(self, rows: Tensor, meta: tuple[Transit, Any]) -> Transit:
        """Sum by rank, then by node, and start to send these sums back."""
        dispatched, within = meta
        return exchange.start_combine(self.node.combine(rows, within), dispatched)
