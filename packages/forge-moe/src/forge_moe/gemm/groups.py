"""Rows sorted by expert, described by how many each expert has.

Shapes: R rows, E experts (those of this process).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """counts (E,) int; ends (E,) int32, where each expert's rows end; `sizes`, the counts on the host, only
    for backends that loop there; `full`: the groups are known to fill all R rows, there is no tail."""

    counts: Tensor
    ends: Tensor
    sizes: list[int] | None
    full: bool

    @staticmethod
    def of(counts: Tensor, *, on_host: bool, full: bool) -> "Groups":
        """Groups of `counts`. `on_host` costs one host sync on an accelerator."""
        ends = counts.cumsum(0, dtype=torch.int32)
        return Groups(counts, ends, counts.tolist() if on_host else None, full)

    def tail(self, num_rows: int) -> Tensor:
        """(R, 1) bool: rows that belong to no expert."""
        return (torch.arange(num_rows, device=self.ends.device) >= self.ends[-1]).unsqueeze(1)

    def experts_of_rows(self, num_rows: int) -> Tensor:
        """(R,) int64: the expert of each row; the last one for the tail."""
        rows = torch.arange(num_rows, device=self.ends.device, dtype=torch.int32)
        found = torch.searchsorted(self.ends, rows, right=True)
        return found.clamp_(max=self.ends.numel() - 1)
