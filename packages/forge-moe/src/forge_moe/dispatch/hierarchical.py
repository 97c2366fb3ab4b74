"""Dispatch in two steps: between nodes once per token and node, then among the ranks of a node.

Shapes: T tokens of this rank, K slots per token, D width, E experts, V nodes, L ranks of a node, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe.dispatch import exchange
from forge_moe.dispatch.all_to_all import AllToAllDispatch, Meta, Splits, check_divisible
from forge_moe.dispatch.chunked import ChunkedDispatch
from forge_moe.dispatch.exchange import Exchange, Route
from forge_moe.protocols import Dispatched
from forge_moe.replay import record_or_replay


class TwoSplits(NamedTuple):
    """Sizes on the host: rows to and from each node (V,), and the sizes of the step within the node."""

    sent: list[int]
    received: list[int]
    within: Splits


class HierarchicalDispatch(ChunkedDispatch):
    """All-to-all that crosses the slow network once per token and node (DeepSeek-V3, section 3.2.2).

        dispatcher = HierarchicalDispatch(between, within, num_experts=256)

    `between` holds the ranks with this rank's index in each of the V nodes, `within` the L ranks of this
    node; rank v L + l holds the same experts as in an `AllToAllDispatch` over V L ranks, and the calls are
    the same. A token is sent to the rank of the same index on each node that has experts of it, and from
    there to the ranks of the node. Partial sums of a node are added in fp32 before they leave it. With
    routing limited to `top_groups` groups, a node to a group, a token goes to at most `top_groups` nodes.

    Each step rounds to x's dtype once: to first order in its unit roundoff u an element of y changes by at
    most u (sum |p_r| + sum |q_v|), p_r the partial sums of ranks and q_v those of nodes.

    Costs per layer: in the forward two exchanges of counts, two of rows, two of sums; in the backward four;
    one host sync. With chunks the exchanges between nodes overlap with the experts, those within a node do
    not. Raises ValueError when the ranks do not divide the experts.
    """

    def __init__(
        self,
        between: dist.ProcessGroup,
        within: dist.ProcessGroup,
        num_experts: int,
        *,
        chunks: int = 1,
    ) -> None:
        super().__init__(chunks)
        self.between = between
        self.nodes = dist.get_world_size(between)
        self.ranks = self.nodes * dist.get_world_size(within)
        check_divisible(num_experts, self.ranks)
        self.experts_per_node = num_experts // self.nodes
        self.node = AllToAllDispatch(within, self.experts_per_node)

    def exchange_splits(self, ids: Sequence[Tensor]) -> list[TwoSplits]:
        """Sizes of both steps for each chunk: two small exchanges, one host sync.

        A rank sends not only the number of rows for a node but also how many of these each rank of that
        node will get, so the second step's sizes are known before the first row is sent.
        """
        return record_or_replay(self, "splits", lambda: self._exchange_splits(ids))

    def _exchange_splits(self, ids: Sequence[Tensor]) -> list[TwoSplits]:
        masks = [
            exchange.token_rank_mask(part // self.experts_per_node, self.nodes) for part in ids
        ]
        to_nodes = torch.stack([mask.sum(0) for mask in masks])  # (C, V)
        per_rank = self.node.experts_per_rank
        to_ranks = torch.stack(
            [exchange.rows_with_slot(part // per_rank, self.ranks) for part in ids]
        ).unflatten(1, (self.nodes, -1))  # (C, V, L, K)
        outgoing = torch.cat((to_nodes.unsqueeze(2), to_ranks.flatten(2)), dim=2)
        incoming = exchange.exchange_counts(outgoing, self.between)  # (C, V, 1 + L K)
        forwarded = incoming[..., 1:].sum(1).view(len(ids), self.node.ranks, -1)  # (C, L, K)
        gathered = exchange.exchange_counts(forwarded, self.node.group)
        sizes = exchange.to_host(
            outgoing[..., 0],
            incoming[..., 0],
            forwarded[..., 0],
            gathered[..., 0],
            gathered.sum(1),
        )
        return [
            TwoSplits(sent, received, Splits(*within)) for sent, received, *within in zip(*sizes)
        ]

    def start_dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, splits: TwoSplits
    ) -> tuple[Exchange, Splits]:
        """Start to send the rows between nodes; other work may follow before `finish_dispatch`."""
        node_of_slot = ids // self.experts_per_node
        route = Route.of(node_of_slot, self.between, splits.sent, splits.received)
        started = exchange.start_dispatch(x, weights, ids, route, self.experts_per_node)
        return started, splits.within

    def finish_dispatch(self, started: tuple[Exchange, Splits]) -> Dispatched:
        """Wait for the rows, send them on within the node, sort them by expert."""
        dispatched, within = started
        rows = exchange.finish_dispatch(dispatched)
        sent = self.node.finish_dispatch(self.node.start_dispatch(*rows, within))
        return sent._replace(meta=(dispatched, sent.meta))

    def start_combine(self, rows: Tensor, meta: tuple[Exchange, Meta]) -> Exchange:
        """Sum by rank, then by node, and start to send these sums back."""
        dispatched, within = meta
        return exchange.start_combine(self.node.combine(rows, within), dispatched)

    def finish_combine(self, combining: Exchange) -> Tensor:
        """Wait for the nodes' sums and add them up: (T, D) fp32."""
        return exchange.finish_combine(combining)
