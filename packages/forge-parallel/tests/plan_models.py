"""A plain Llama-like model with everything that the planner asks for, at any size."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width = dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * width, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * width, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.attend = SimpleNamespace(is_causal=True)  # the planner asks no more of it

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim, bias=False), Attention(dim, heads, kv_heads)
        self.norm_2 = nn.LayerNorm(dim, bias=False)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.attention_flops = 2.0 * dim

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.norm_2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def flops_per_token(self, seq_len: int) -> float:
        return 2.0 * sum(p.numel() for p in self.parameters()) + self.attention_flops * seq_len


class Llama(nn.Module):
    def __init__(
        self, dim: int = 64, layers: int = 4, heads: int = 4, kv_heads: int = 2, hidden: int = 160,
        vocab: int = 96,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, bias=False), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def pipeline_parts(self) -> dict[str, object]:
        return {"first": ("embedding",), "blocks": "layers", "last": ("norm", "head")}

    def parallel_roles(self) -> dict[str, str]:
        cut = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        of_block = {f"attention.{name}.*": role for name, role in cut.items()} | {
            "norm.*": "sequence", "norm_2.*": "sequence",
            "gate_proj.*": "colwise", "up_proj.*": "colwise", "down_proj.*": "rowwise",
        }  # fmt: skip
        ends = {"embedding.*": "vocab", "norm.*": "sequence", "head.*": "sharded_logits"}
        return ends | {f"layers.*.{name}": role for name, role in of_block.items()}


def on_meta(**sizes: int) -> Llama:
    with torch.device("meta"):
        return Llama(**sizes)
