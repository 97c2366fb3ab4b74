"""Routes of MoE layers that are given from outside, the same for each framework.

The null GPU says 0 of every number, so a router there sends all tokens to one expert. Its kernels run as they do elsewhere:
none of them reads ids. The host does, for the split sizes of an exchange between ranks, and gets those of the given routes.

    python -m tests.null_gpu.routes record FILE     # trains a small model, and writes the trace of its hot experts

Shapes: W ranks, T tokens of a rank, K slots per token, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: A trace of 64 experts, 6 for each token, without balancing: the fullest expert has 5.4 times the mean.
HOT = Path(__file__).with_name("hot_experts.trace")


class WrongRoutes(ValueError):
    """Routes that a model cannot have, or none at all."""


class Routes(NamedTuple):
    """The experts of the tokens of each rank: ids (W, T, K) int64, on the host."""

    ids: Tensor
    num_experts: int

    @property
    def slots(self) -> Tensor:
        """(W, T, W): slots of each token, by its rank and the rank of its experts."""
        ranks = len(self.ids)
        owner = self.ids // (self.num_experts // ranks)  # (W, T, K)
        return torch.nn.functional.one_hot(owner, ranks).sum(2)

    def tokens_sent(self, rank: int) -> list[int]:
        """(W,): tokens that a rank sends, once to each rank that has experts of them."""
        found: list[int] = (self.slots[rank] > 0).sum(0).tolist()
        return found

    def tokens_received(self, rank: int) -> list[int]:
        """(W,): tokens that a rank receives."""
        found: list[int] = (self.slots[:, :, rank] > 0).sum(1).tolist()
        return found

    def tokens_with_slot(self, rank: int) -> list[int]:
        """(K,): received tokens with more than j slots there, j < K."""
        received = self.slots[:, :, rank].flatten()
        return [int((received > j).sum()) for j in range(self.ids.size(2))]

    def rows(self, rank: int) -> int:
        """Rows that the experts of a rank compute."""
        return int(self.slots[:, :, rank].sum())

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """(rows sent, rows received), each (W,), of an exchange that sends a row for each slot, as torchtitan's."""
        sent, received = self.slots[rank].sum(0), self.slots[:, :, rank].sum(1)
        return sent.tolist(), received.tolist()

    def fullest(self) -> float:
        """Load of the fullest expert over the mean."""
        counts = torch.bincount(self.ids.flatten(), minlength=self.num_experts)
        return float(counts.max() / counts.double().mean())


def round_robin(ranks: int, tokens: int, top_k: int, num_experts: int) -> Routes:
    """Each expert has the same number of slots, if E divides T K."""
    slots = torch.arange(ranks * tokens * top_k).view(ranks, tokens, top_k)
    return Routes(slots % num_experts, num_experts)


def recorded(path: Path, ranks: int, tokens: int, top_k: int, num_experts: int) -> Routes:
    """Those of the first record of a trace, repeated; each rank begins at another token.

    WrongRoutes for a trace of more experts, or of another number of slots.
    """
    from forge_moe.traces import read_trace

    ids = next(read_trace(path)).ids
    if ids.size(1) != top_k or int(ids.max()) >= num_experts:
        rule = f"has {ids.size(1)} experts for each token, up to number {int(ids.max())}"
        raise WrongRoutes(
            f"{path.name} {rule}, and the model {top_k} of {num_experts}; use 'round robin'"
        )
    first = torch.arange(ranks).unsqueeze(1) * (len(ids) // ranks)  # (W, 1)
    return Routes(ids[(first + torch.arange(tokens)) % len(ids)], num_experts)


def find_routes(name: str, ranks: int, tokens: int, top_k: int, num_experts: int) -> Routes:
    """Routes by name: "round robin" or "hot experts". WrongRoutes for another one, natural routing included."""
    if name == "round robin":
        return round_robin(ranks, tokens, top_k, num_experts)
    if name == "hot experts":
        return recorded(HOT, ranks, tokens, top_k, num_experts)
    rule = "the device says 0 of every number, and all tokens would choose the same expert"
    raise WrongRoutes(f"routes are {name!r}: {rule}; use 'round robin' or 'hot experts'")


def force(routes: Routes, rank: int = 0) -> None:
    """Let the dispatch between ranks in this process read the sizes of `routes`; the host still waits for its copy."""
    from forge_moe.dispatch import exchange

    wait: Callable[[Any], Any] = exchange.to_host
    sizes = (routes.tokens_sent(rank), routes.tokens_received(rank), routes.tokens_with_slot(rank))

    def to_host(copy: Any) -> list[list[list[int]]]:
        wait(copy)
        return [[list(each)] for each in sizes]

    exchange.to_host = to_host


def record(path: Path, tokens: int = 512) -> None:
    """Write the routes of a layer of 64 experts that nothing balances, after 40 steps on the CPU."""
    from forge_moe import MoE
    from forge_moe.traces import TraceWriter, trace_routes

    torch.manual_seed(0)
    layer = MoE(dim=32, hidden_dim=32, num_experts=64, top_k=6)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    wanted = torch.nn.Linear(32, 32).requires_grad_(False)
    for _ in range(40):
        x = torch.randn(tokens, 32) + 0.15  # tokens with a mean, as those of a deep layer
        torch.nn.functional.mse_loss(layer(x), wanted(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    path.unlink(missing_ok=True)
    with TraceWriter(path, {"layer": 64}) as trace:
        holder = torch.nn.ModuleDict({"layer": layer})
        with torch.no_grad(), trace_routes(holder, trace, step=lambda: 40):
            layer(torch.randn(tokens, 32) + 0.15)


if __name__ == "__main__":
    record(Path(sys.argv[2]))
    routes = recorded(Path(sys.argv[2]), 8, 4096, 6, 64)
    print(
        f"fullest expert {routes.fullest():.1f} x the mean, rows of rank 0 to 7: {[routes.rows(rank) for rank in range(8)]}"
    )
