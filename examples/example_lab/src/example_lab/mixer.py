"""A token mixer whose memory of earlier tokens fades.

Shapes: B rows, S tokens, T tokens with cached ones, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Decay(nn.Module):
    """Sum of the values of a document so far, halved every `half_life` tokens."""

    def __init__(self, config: Any, layer: int, half_life: float = 4.0) -> None:
        super().__init__()
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.half_life = half_life * 2**layer

    def forward(self, x: Tensor, ctx: Any = None, cache: Any = None) -> Tensor:
        v = self.value(x)
        if cache is not None:
            v = cache.append(v.unsqueeze(2), v.unsqueeze(2))[0].squeeze(1)  # (B, T, D)
        index = torch.arange(v.size(1), device=x.device)
        age = (index[:, None] - index).clamp(min=0)
        weights = (0.5 ** (age / self.half_life)).tril()  # (T, T)
        ids = None if ctx is None or cache is not None else ctx.document_ids
        if ids is not None:
            ids = ids.to(x.device)
            weights = weights * (ids[:, :, None] == ids[:, None, :])  # (B, S, S)
        mixed: Tensor = self.out((weights.to(v.dtype) @ v)[:, -x.size(1) :])
        return mixed

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        return {"value.weight": ("normal", std), "out.weight": ("normal", residual_std)}

    def flops_per_token(self, seq_len: int) -> float:
        return 4.0 * self.value.weight.numel() + 2.0 * seq_len * self.out.in_features
