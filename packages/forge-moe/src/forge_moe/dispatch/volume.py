"""How many bytes a dispatch sends, from the routes alone.

Shapes: T tokens, K slots per token, D width, E experts, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from forge_moe.dispatch.wire import RowLayout, wants

_COUNT_BYTES = 8


class Volume(NamedTuple):
    """Bytes that one rank hands to the exchanges of one layer, forward and backward.

    `counts` split sizes, `rows` tokens with their ids and weights, `sums` weighted outputs on their way
    back, `sum_grads` and `row_grads` their gradients.
    """

    counts: int
    rows: int
    sums: int
    sum_grads: int
    row_grads: int

    @property
    def forward(self) -> int:
        return self.counts + self.rows + self.sums

    @property
    def backward(self) -> int:
        return self.sum_grads + self.row_grads


def copies(ids: Tensor, num_experts: int, ranks: int) -> list[int]:
    """Rows that tokens with ids (T, K) in 0..E make for each of `ranks` ranks: (W,).

        copies(ids, 64, 8)      # per rank; copies(ids, 64, 2) per node of two

    A token counts once per rank however many of its experts live there. Syncs with the device.
    """
    return wants(ids // (num_experts // ranks), ranks).sum(0).tolist()


def exchange_volume(
    sent: Sequence[int],
    received: Sequence[int],
    *,
    dim: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    numbers: int,
    chunks: int = 1,
    rank: int | None = None,
) -> Volume:
    """Bytes of one step of a dispatch for a rank that sends and receives these rows per rank (W,).

    A row is its D elements, K fp32 weights and K int32 ids, padded to 16 bytes; its gradient goes without
    ids; a sum is D elements. `numbers` int64 per rank pair and chunk are the split sizes (K in an
    all-to-all step, 1 + L K between nodes of L ranks). With `rank`, this rank's own, what it sends to
    itself (no network) is left out. `AllToAllDispatch` is one step, `HierarchicalDispatch` two.
    """
    out = [n for r, n in enumerate(sent) if r != rank]
    back = [n for r, n in enumerate(received) if r != rank]
    layout = RowLayout(dim, top_k, dtype, torch.float32)
    width = dim * dtype.itemsize
    return Volume(
        counts=len(out) * chunks * numbers * _COUNT_BYTES,
        rows=sum(out) * layout.num_bytes,
        sums=sum(back) * width,
        sum_grads=sum(out) * width,
        row_grads=sum(back) * layout._replace(with_ids=False).num_bytes,
    )


def expected_copies(num_experts: int, top_k: int, ranks: int) -> float:
    """Ranks that a token visits on average when every set of K experts is as likely.

        expected_copies(256, 8, 8)      # 5.3 rows of a token leave, instead of 8

    W (1 - C(E - E/W, K) / C(E, K)): a rank is missed when all K experts lie on others.
    """
    others = num_experts - num_experts // ranks
    return ranks * (1.0 - comb(others, top_k) / comb(num_experts, top_k))
