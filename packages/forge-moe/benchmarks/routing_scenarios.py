"""Routes as a router might give them on a bad day, chosen by hand.

Each scenario is a function `(shape, rank, step) -> ids (T, K) int64` with distinct experts per token;
the same arguments give the same ids on every rank.

Shapes: T tokens of a rank, K slots per token, E experts, W ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """T, E, K, and the number of ranks that share the experts."""

    num_tokens: int
    num_experts: int
    top_k: int
    num_ranks: int = 1


Scenario = Callable[[Shape, int, int], Tensor]


def balanced(shape: Shape, rank: int, step: int) -> Tensor:
    """Every expert gets the same number of rows, up to one."""
    return _deal(shape, shape.num_experts)


def hot_expert(shape: Shape, rank: int, step: int) -> Tensor:
    """Every token goes to expert 0; its other slots are even over the rest."""
    return _hot(shape, 0)


def hot_rank(shape: Shape, rank: int, step: int) -> Tensor:
    """Only experts of rank 0 are chosen, as far as they fill K slots."""
    return _deal(shape, max(shape.num_experts // shape.num_ranks, shape.top_k))


def ragged(shape: Shape, rank: int, step: int) -> Tensor:
    """Popularity falls like 1 / (e + 1): no two experts get the same, many get few."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    log_p = -torch.arange(1, shape.num_experts + 1).float().log()
    uniform = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
    gumbel = -(-uniform.clamp(min=1e-9).log()).log()  # top-k of these draws without replacement
    return (log_p + gumbel).topk(shape.top_k, dim=1).indices


def zero_tokens(shape: Shape, rank: int, step: int) -> Tensor:
    """Rank 0 has no token at all; the others are balanced."""
    return balanced(shape, rank, step)[: 0 if rank == 0 else None]


def rotating(shape: Shape, rank: int, step: int) -> Tensor:
    """The hot expert moves on with each step, a rank's width at a time."""
    stride = max(1, shape.num_experts // shape.num_ranks)
    return _hot(shape, step * stride % shape.num_experts)


def burst(shape: Shape, rank: int, step: int) -> Tensor:
    """Balanced, but in every fourth step all tokens choose the same K experts."""
    return _deal(shape, shape.top_k if step % 4 == 3 else shape.num_experts)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (balanced, hot_expert, hot_rank, ragged, zero_tokens, rotating, burst)
}


def _deal(shape: Shape, num_experts: int) -> Tensor:
    """Experts 0 .. num_experts - 1 in turn, slot by slot."""
    slots = torch.arange(shape.num_tokens * shape.top_k)
    return (slots % num_experts).view(shape.num_tokens, shape.top_k)


def _hot(shape: Shape, hot: int) -> Tensor:
    """`hot` in the first slot, the others in turn in the rest."""
    first = torch.full((shape.num_tokens, 1), hot)
    if shape.top_k == 1:
        return first
    others = _deal(shape._replace(top_k=shape.top_k - 1), shape.num_experts - 1)
    return torch.cat((first, others + (others >= hot)), dim=1)
