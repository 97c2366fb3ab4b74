"""A router of Forge in a layer of another code base, which has experts of its own."""

import torch
from torch import Tensor, nn

from forge_moe import Router


class OwnLayer(nn.Module):
    """Experts are a list of modules."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = Router(dim=dim, num_experts=num_experts, top_k=2)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)  # (T, K) each
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


torch.manual_seed(0)
layer, x = OwnLayer(8, 4), torch.randn(10, 8)
y = layer(x)
y.sum().backward()
