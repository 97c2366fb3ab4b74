"""Experts for routers of one's own, whose rows are sorted by expert already, on one rank or over several.

Shapes: R rows of this rank, E experts, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forge_moe.experts import Experts
from forge_moe.protocols import OverlappingDispatcher

__all__ = ["SortedExperts", "sorted_experts_by_name"]


class SortedExperts(Experts):
    """`Experts` that take rows of all E experts, also where `expert_parallelize` gave this rank a part of them.

        experts = SortedExperts(MoEConfig(dim=64, hidden_dim=128, num_experts=4))
        experts(rows, counts)   # rows (R, D) sorted by expert, counts (E,) ints on the device, of sum R -> (R, D)

    Who routes tokens in another way than `MoE` (by modality, say) calls them. Over ranks each row is sent to that of its
    expert and back, once for each of its experts; R may differ among ranks and be 0, and all ranks call it equally
    often. Cost there: that of an `AllToAllDispatch` with one slot a row, one host sync.
    """

    dispatcher: OverlappingDispatcher | None = None

    def forward(self, rows: Tensor, counts: Tensor, *, full: bool = True) -> Tensor:
        """Rows (R, D) through their experts, in the dtype of the matrices' products."""
        if self.dispatcher is None:
            return super().forward(rows, counts, full=full)
        ids = torch.arange(self.config.num_experts, device=counts.device)
        ids = ids.repeat_interleave(counts, output_size=len(rows))[:, None]  # (R, 1)
        weights = torch.ones(ids.shape, device=rows.device)
        out, _ = self.dispatcher.run(rows, weights, ids, super().forward)
        return out.to(rows.dtype)


def sorted_experts_by_name(model: nn.Module) -> dict[str, Any]:
    """The `SortedExperts` in a model by their names."""
    return {n: m for n, m in model.named_modules() if isinstance(m, SortedExperts)}
