"""Dispatch in two steps: between nodes once per token and node, then among the ranks of a node.

Shapes: T tokens here, K slots per token, D width, E experts, V nodes, L ranks of a node, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe.dispatch import wire
from forge_moe.dispatch.all_to_all import AllToAllDispatch, Splits, check_division
from forge_moe.dispatch.chunked import ChunkedDispatch
from forge_moe.dispatch.local import Dispatched
from forge_moe.replay import recall


class TwoSplits(NamedTuple):
    """What the host must know: rows to and from each node, and the sizes of the step within the node."""

    sent: list[int]
    received: list[int]
    within: Splits


class HierarchicalDispatch(ChunkedDispatch):
    """All-to-all that crosses the slow network once per token and node (DeepSeek-V3, section 3.2.2).

        dispatcher = HierarchicalDispatch(between, within, num_experts=256)

    `between` holds the ranks with this rank's place in each of the V nodes, `within` the L ranks of this
    node; rank v L + l holds the experts that it has in an `AllToAllDispatch` over V L ranks, and the calls
    are the same. A token goes to its counterpart rank on each node that has experts of it, and from there
    to the ranks. On the way home the sums of a node are added in fp32 before they leave it. With routing
    limited to `top_groups` groups, a node to a group, a token goes to at most `top_groups` nodes.

    The wire rounds to x's dtype once per step: to first order in its unit roundoff u an element of y
    changes by at most u (sum |p_r| + sum |q_v|), p_r the parts of ranks and q_v those of nodes.

    Costs a layer: in the forward two exchanges of counts, two of rows, two of sums; in the backward four;
    one host sync. With chunks the exchanges between nodes run under the experts, those within a node do
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
        check_division(num_experts, self.ranks)
        self.experts_node = num_experts // self.nodes
        self.node = AllToAllDispatch(within, self.experts_node)

    def agree(self, ids: Sequence[Tensor]) -> list[TwoSplits]:
        """Sizes of both steps for each chunk: two small exchanges, one host sync.

        A rank tells its counterparts not only how many rows they will get but also what each rank of their
        node will get of these, so the second step's sizes are known before the first row moves.
        """
        return recall(self, "splits", lambda: self._agree(ids))

    def _agree(self, ids: Sequence[Tensor]) -> list[TwoSplits]:
        rows = [wire.wants(part // self.experts_node, self.nodes).sum(0) for part in ids]  # (V,)
        having = [wire.rows_having(part // self.node.experts_here, self.ranks) for part in ids]
        onward = torch.stack(having).unflatten(1, (self.nodes, -1))  # (C, V, L, K)
        out = torch.cat((torch.stack(rows).unsqueeze(2), onward.flatten(2)), dim=2)
        arriving = wire.swap(out, self.between)  # (C, V, 1 + L K)
        relayed = arriving[..., 1:].sum(1).view(len(ids), self.node.ranks, -1)  # (C, L, K)
        gathered = wire.swap(relayed, self.node.group)
        lists = wire.to_host(
            out[..., 0], arriving[..., 0], relayed[..., 0], gathered[..., 0], gathered.sum(1)
        )
        return [TwoSplits(s, r, Splits(*within)) for s, r, *within in zip(*lists)]

    def send(self, x: Tensor, weights: Tensor, ids: Tensor, splits: TwoSplits) -> Pending:
        """Start the rows between nodes; other work may follow before `receive`."""
        owner = ids // self.experts_node
        route = wire.Route.of(owner, self.between, splits.sent, splits.received)
        return Pending(wire.send_out(x, weights, ids, route, self.experts_node), splits.within)

    def receive(self, pending: Pending) -> Dispatched:
        """Wait for the rows, pass them on within the node, sort them by expert."""
        sent = self.node.receive(self.node.send(*wire.arrive(pending.trip), pending.within))
        return sent._replace(meta=(pending.trip, sent.meta))

    def give_back(self, rows: Tensor, meta: tuple) -> wire.Trip:
        """Sum by rank, then by node, and start these sums; work may follow before `collect`."""
        trip, within = meta
        return wire.send_home(self.node.combine(rows, within), trip)

    def collect(self, trip: wire.Trip) -> Tensor:
        """Wait for the nodes' sums and add them up: (T, D) fp32."""
        return wire.arrive_home(trip)


class Pending(NamedTuple):
    """Rows on their way between nodes."""

    trip: wire.Trip
    within: Splits
