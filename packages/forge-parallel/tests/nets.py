"""Small models with `blocks()`, and the tensors of ranks in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_testing import device

DIM = 32


class Mixer(nn.Module):
    """Causal attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (h.unflatten(-1, (4, -1)).transpose(1, 2) for h in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layers(nn.Module):
    """Blocks that are called as `block(x, scale=0.5)`."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x, scale=0.5)
        return x


class Residual(nn.Module):
    """Residual blocks in `middle` between two linear layers."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.middle = nn.ModuleList([nn.Linear(8, 8) for _ in range(num_blocks)])

    def blocks(self) -> list[nn.Module]:
        return list(self.middle)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows)
        for block in self.middle:
            x = x + torch.tanh(block(x))
        return self.last(x)


class Stack(nn.Module):
    """Two residual blocks in `middle`, made and called between two linear layers; `seen` are the dtypes of the stream."""

    def __init__(self, width_in: int, width: int, width_out: int) -> None:
        super().__init__()
        self.first = nn.Linear(width_in, width)
        self.middle = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.last = nn.Linear(width, width_out)
        self.seen: set[torch.dtype] = set()

    def blocks(self) -> list[nn.Module]:
        return list(self.middle)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.middle:
            x = x + block(torch.tanh(x))
            self.seen.add(x.dtype)
        return self.last(x)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train_sharded(train: Callable[..., Any], model: nn.Module, options: dict[str, Any]) -> Any:
    """`train(model, rank, ranks)` of the model in a layout; ranks are those that read other rows."""
    config = ParallelConfig(**{"device": device().type, "precision": "fp32", **options})
    meshes = make_meshes(config)
    return train(parallelize(model, config, meshes), meshes.batch_rank, meshes.batch_size)
