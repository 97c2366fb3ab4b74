"""The experts that this package has of its own: feed-forwards in a row.

Shapes: R rows sorted by expert, E experts, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.kinds import is_matrix, parameter_kinds
from forge_core.model import FeedForward

__all__ = ["GroupExperts", "expert_sources"]


class GroupExperts(nn.Module):
    """E feed-forwards, each applied to its own rows.

        GroupExperts(4, dim=64, hidden_dim=128, kind="swiglu", bias=False)(rows, counts)   # (R, D) -> (R, D)

    rows are sorted by expert, counts (E,) ints. Each expert runs once, also on no rows. One host sync for counts on an
    accelerator: give experts with grouped products to MoMa where that counts.
    """

    def __init__(self, num: int, dim: int, hidden_dim: int, *, kind: str, bias: bool) -> None:
        super().__init__()
        made = {str(e): FeedForward(dim, hidden_dim, kind=kind, bias=bias) for e in range(num)}
        self.each = nn.ModuleDict(made)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.each.values(), parts)])


def expert_sources(experts: nn.Module) -> dict[str, str]:
    """{parameter of experts: the one of a dense feed-forward that it begins as a copy of}.

    Known are feed-forwards below a number (`each.0.up_proj.weight`), and stacks (E, in, out) named as the linear layers
    of the dense one (`up_proj`), whose biases end in `_bias`.
    """
    found = {}
    for name, parameter in experts.named_parameters():
        parts = name.split(".")
        if len(parts) == 1:
            stem = name.removesuffix("_bias")
            found[name] = f"{stem}.{'bias' if stem != name else 'weight'}"
        elif parameter.ndim <= 2:
            found[name] = ".".join(parts[-2:])
    return found


def expert_flops(experts: Any, num: int, *, frozen: bool = False) -> float:
    """Forward FLOPs of one of `num` experts for one token: two for each weight of its matrices; of frozen ones alone."""
    kinds = parameter_kinds(experts)
    matrices = (p for n, p in experts.named_parameters() if is_matrix(kinds[n]))
    return 2.0 * sum(p.numel() for p in matrices if not (frozen and p.requires_grad)) / num
