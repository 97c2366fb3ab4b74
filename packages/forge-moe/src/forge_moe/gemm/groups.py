"""Groups of rows sorted by expert, described by the number of rows of each expert.

Shapes: R rows, E experts of this process.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """counts (E,) int; ends (E,) int32, the end of each expert's rows; `host_sizes`, the counts on the host,
    for backends that loop there, else None; `full`: the groups fill all R rows, there is no tail."""

    counts: Tensor
    ends: Tensor
    host_sizes: list[int] | None
    full: bool

    @staticmethod
    def of(counts: Tensor, *, host_sizes: bool, full: bool) -> "Groups":
        """Groups of `counts`. `host_sizes` costs one host sync on an accelerator."""
        ends = counts.cumsum(0, dtype=torch.int32)
        return Groups(counts, ends, counts.tolist() if host_sizes else None, full)

    def tail(self, num_rows: int) -> Tensor:
        """(R, 1) bool: rows of no expert."""
        return (torch.arange(num_rows, device=self.ends.device) >= self.ends[-1]).unsqueeze(1)

    def experts_of_rows(self, num_rows: int) -> Tensor:
        """(R,) int64: the expert of each row; the last one for the tail."""
        rows = torch.arange(num_rows, device=self.ends.device, dtype=torch.int32)
        found = torch.searchsorted(self.ends, rows, right=True)
        return found.clamp_(max=self.ends.numel() - 1)
