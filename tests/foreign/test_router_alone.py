"""A router of Forge in a layer of another code base, which has experts of its own."""

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.lane("test"), pytest.mark.uses("forge_moe")]


class OwnLayer(nn.Module):
    """Experts are a list of modules."""

    def __init__(self, dim: int, num_experts: int) -> None:
        from forge_moe import Router

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


def test_the_output_is_that_of_a_softmax_over_the_two_best() -> None:
    torch.manual_seed(0)
    layer, x = OwnLayer(8, 4), torch.randn(10, 8)
    y = layer(x)
    best, ids = (x @ layer.router.weight.T).topk(2)
    outputs = torch.stack([expert(x) for expert in layer.experts], dim=1)  # (T, E, D)
    chosen = outputs.gather(1, ids[..., None].expand(-1, -1, 8))
    wanted = (best.softmax(-1)[..., None] * chosen).sum(1)
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0
