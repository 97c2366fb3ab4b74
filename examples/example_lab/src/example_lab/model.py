"""A language model without attention: each layer mixes a token with the one before it.

Shapes: B rows, S tokens, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.inside = nn.RMSNorm(dim), nn.Linear(2 * dim, 4 * dim)
        self.outside = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        y = self.norm(x)
        before = F.pad(y, (0, 0, 1, 0))[:, :-1] * same  # (B, S, D), zero where a document begins
        mixed: Tensor = self.outside(F.gelu(self.inside(torch.cat([y, before], -1))))
        return x + mixed


class Neighbors(nn.Module):
    def __init__(self, vocab_size: int, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Any = None, document_ids: Any = None) -> Tensor:
        x = self.embedding(tokens)
        ids = torch.zeros_like(tokens) if document_ids is None else document_ids.to(tokens.device)
        same = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0)).unsqueeze(-1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, same)
        logits: Tensor = self.head(x)
        return logits

    def flops_per_token(self, seq_len: int) -> float:
        return 2.0 * sum(p.numel() for n, p in self.named_parameters() if "embedding" not in n)


def neighbors(vocab_size: int, dim: int = 32, num_layers: int = 2) -> Neighbors:
    return Neighbors(vocab_size, dim, num_layers)
