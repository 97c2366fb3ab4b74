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
from forge_moe.dispatch.exchange import AllToAllPlan, HostCopy, Transit
from forge_moe.dispatch.local import Permutation
from forge_moe.load_balancing import count_ids
from forge_moe.protocols import Dispatched
from forge_moe.replay import record_or_replay, replaying


class ChunkedDispatch:
    """`dispatch`, `combine` and `run` of dispatchers between ranks, composed of steps that they define.

    start_splits(list of ids (T_c, K)) starts to copy the sizes of all chunks to the host; splits(that copy) -> for each
    chunk (tokens sent, tokens received, rest); finish_dispatch(started exchange, rest) -> Dispatched;
    start_combine(rows, meta) starts to send sums back.

    `group`: the ranks of the exchange. Each of its members has `experts_per_member` experts, of its own or of its node.
    """

    start_splits: Callable[[Sequence[Tensor]], HostCopy]
    splits: Callable[[HostCopy], Sequence[tuple[list[int], list[int], Any]]]
    finish_dispatch: Callable[[Transit, Any], Dispatched]
    start_combine: Callable[[Tensor, Any], Transit]

    def __init__(self, group: dist.ProcessGroup, experts_per_member: int, chunks: int) -> None:
        if chunks < 1:
            raise invalid("chunks", "range", chunks, "must be at least 1", "use 1, or 2 to overlap")
        self.group, self.experts_per_member, self.chunks = group, experts_per_member, chunks

    def dispatch(self, x: Tensor, weights: Tensor, ids: Tensor) -> Dispatched:
        """x (T, D), weights (T, K), ids (T, K) -> rows (R, D) by expert, counts (E,), no tail."""
        copy, begun = self._start_splits([ids]), self.begin_dispatch(x, weights, ids)
        (splits,) = self._recorded_splits(copy)
        return self.finish_dispatch(*self.start_dispatch(begun, splits))

    def begin_dispatch(self, x: Tensor, weights: Tensor, ids: Tensor) -> Transit:
        """Plan the exchange of the tokens, without sizes on the host."""
        plan = AllToAllPlan.of(ids // self.experts_per_member, self.group)
        return exchange.begin_dispatch(x, weights, ids, plan, self.experts_per_member)

    def start_dispatch(
        self, begun: Transit, splits: tuple[list[int], list[int], Any]
    ) -> tuple[Transit, Any]:
        """Start to send the tokens; other work may follow before `finish_dispatch`."""
        sent, received, rest = splits
        exchange.start_dispatch(begun, sent, received)
        return begun, rest

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

        The tokens are split into `chunks`; one exchange gives the sizes of all of them, and the host waits once, for these.
        The first plan and `overlapped` (shared experts) are queued before that, so a device computes while the host waits and
        launches the transfer. The tokens of chunk i + 1 and the sums of chunk i - 1 are in transfer while the experts
        compute chunk i. Autograd takes the steps in reverse, so gradients overlap with the same work.

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

        # The host waits for the copy of the sizes only: what is queued after it keeps the device busy meanwhile.
        copy = self._start_splits(id_chunks)
        chunks = list(zip(x.split(sizes), weights.split(sizes), id_chunks))
        begun = self.begin_dispatch(*chunks[0])
        alongside = overlapped() if overlapped is not None else None
        splits = self._recorded_splits(copy)

        started = self.start_dispatch(begun, splits[0])
        combining = []
        for following in [*zip(chunks[1:], splits[1:]), None]:
            current = started
            if following is not None:  # in transfer while the experts compute the current chunk
                chunk, sizes_of_chunk = following
                started = self.start_dispatch(self.begin_dispatch(*chunk), sizes_of_chunk)
            sent = self.finish_dispatch(*current)
            out = experts(sent.rows, sent.counts, full=True)
            combining.append(self.start_combine(out, sent.meta))

        sums = [exchange.finish_combine(each) for each in combining]
        return sums[0] if len(sums) == 1 else torch.cat(sums), alongside

    # A recomputation reads the sizes of its forward: no second exchange of counts, no second host sync.

    def _start_splits(self, ids: Sequence[Tensor]) -> HostCopy | None:
        return None if replaying() else self.start_splits(ids)

    def _recorded_splits(self, copy: HostCopy | None) -> Sequence[tuple[list[int], list[int], Any]]:
        def read() -> Sequence[tuple[list[int], list[int], Any]]:
            assert copy is not None, "no value is made where one is replayed"
            return self.splits(copy)

        return record_or_replay(self, "splits", read)


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

    def start_splits(self, ids: Sequence[Tensor]) -> HostCopy:
        """Start to copy the split sizes of each chunk of ids (T_c, K) to the host: one exchange."""
        ranks = [chunk // self.experts_per_member for chunk in ids]
        outgoing = torch.stack([exchange.tokens_with_slot(r, self.ranks) for r in ranks])
        incoming = exchange.exchange_counts(outgoing, self.group)  # (C, W, K)
        return HostCopy.start(outgoing[..., 0], incoming[..., 0], incoming.sum(1))

    def splits(self, copy: HostCopy) -> list[Splits]:
        """Wait for the split sizes: one host sync."""
        return [Splits(*of_chunk) for of_chunk in zip(*exchange.to_host(copy))]

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

    def start_splits(self, ids: Sequence[Tensor]) -> HostCopy:
        """Start to copy the sizes of both steps for each chunk to the host: two small exchanges.

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
        return HostCopy.start(*between, *within)

    def splits(self, copy: HostCopy) -> list[NodeSplits]:
        """Wait for the sizes of both steps: one host sync."""
        sizes = zip(*exchange.to_host(copy))
        return [NodeSplits(sent, received, Splits(*rest)) for sent, received, *rest in sizes]

    def finish_dispatch(self, started: Transit, within: Splits) -> Dispatched:
        """Wait for the tokens, send them on within the node, sort them by expert."""
        received = exchange.finish_dispatch(started)
        begun = self.node.begin_dispatch(*received)
        sent = self.node.finish_dispatch(*self.node.start_dispatch(begun, within))
        return sent._replace(meta=(started, sent.meta))

    def start_combine(self, rows: Tensor, meta: tuple[Transit, Any]) -> Transit:
        """Sum by rank, then by node, and start to send these sums back."""
        dispatched, within = meta
        return exchange.start_combine(self.node.combine(rows, within), dispatched)
