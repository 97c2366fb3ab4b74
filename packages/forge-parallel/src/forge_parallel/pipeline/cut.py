"""The split of a model's depth into stages: the most expensive stage sets the pace, so it is made cheap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from forge_parallel._shared.problems import raise_problems
from forge_parallel.legal import too_few_layers
from forge_parallel.pipeline.parts import blocks_by_key
from forge_parallel.structure import Structure

#: A lookup multiplies nothing, but it moves memory, and its gradient and update pass over the table: this
#: share of what a product with the table would cost.
EMBEDDING_SHARE = 0.05


def block_costs(model: nn.Module, parts: Structure, seq_len: int) -> list[float]:
    """Forward FLOPs per token of each block, in order, in rows of `seq_len`; no communication.

    Counted by the block's own `flops_per_token(seq_len)`, or two per parameter where it offers none. The
    first block also bears the modules before it (EMBEDDING_SHARE of their parameters), the last one the norm
    and head behind it (two per parameter; a tied head is the table as a product).
    """
    costs = [_cost(block, seq_len) for block in blocks_by_key(model, parts).values()]
    if costs:
        before, behind = (
            [model._modules[name] for name in names] for names in (parts.first, parts.last)
        )
        costs[0] += EMBEDDING_SHARE * sum(_products(m) for m in before if m is not None)
        costs[-1] += sum(_cost(m, seq_len) for m in behind if m is not None)
    return costs


def _cost(module: nn.Module, seq_len: int) -> float:
    offer: Any = getattr(module, "flops_per_token", None)
    return float(offer(seq_len)) if callable(offer) else _products(module)


def _products(module: nn.Module) -> float:
    return 2.0 * sum(p.numel() for p in module.parameters())


def stage_ranges(costs: Sequence[float], num_stages: int, first_blocks: int = 1) -> list[range]:
    """The blocks of each stage, neighbors only, none empty: the dearest stage is as cheap as can be.

    The first stage has at least `first_blocks`. Of several such cuts one with the smallest sum of squares, so the
    other stages are even, too. Costs blocks squared times stages. Raises ValueError for fewer blocks than these need.

    Usage: `stage_ranges([1, 1, 1, 3], 2) == [range(0, 3), range(3, 4)]`.
    """
    if wrong := too_few_layers(len(costs), num_stages, first_blocks=first_blocks):
        raise_problems("", [wrong])
    sums = [0.0, *accumulate(costs)]
    limit = _best_ends(sums, num_stages, first_blocks, math.inf, max)[0]
    # sums of floats in another order differ in the last bits
    limit *= 1 + 1e-9
    _, ends = _best_ends(sums, num_stages, first_blocks, limit, lambda so_far, own: so_far + own**2)
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _best_ends(
    sums: Sequence[float],
    num_stages: int,
    first_blocks: int,
    limit: float,
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The cut with the least `join` over its stages' costs, none above `limit`: (value, ends)."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by the end of the last stage so far
    for _ in range(num_stages):
        found: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, ends) in best.items():
            for end in range(start + 1 if start else first_blocks, len(sums)):
                own = sums[end] - sums[start]
                value = join(so_far, own)
                if own <= limit and (end not in found or value < found[end][0]):
                    found[end] = (value, [*ends, end])
        best = found
    return best[len(sums) - 1]
