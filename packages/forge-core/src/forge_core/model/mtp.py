"""Multi-token prediction: modules behind the blocks that predict tokens further ahead, in training alone.

DeepSeek-V3 (2024), section 2.2. Shapes: B rows, S tokens, D width of the stream, K modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.flops import forward_flops, linear_flops
from forge_core.model.block import prepare, roles_of
from forge_core.model.context import TokenContext
from forge_core.model.init import Init, linear_rows


class NextTokenModule(nn.Module):
    """From the stream of the module before and the embedding of a token further ahead to the next stream.

    h (B, S, D), e (B, S, D) -> block(join([stream_norm(h); token_norm(e)])) (B, S, D), equations 21 and 22. `norm`
    stands before the head, which the model shares, as it does the embedding.
    """

    def __init__(
        self, norms: tuple[nn.Module, nn.Module, nn.Module], block: nn.Module, dim: int
    ) -> None:
        super().__init__()
        self.stream_norm, self.token_norm, self.norm = norms
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.block = block

    def forward(self, stream: Tensor, token: Tensor, ctx: TokenContext) -> Tensor:
        both = torch.cat((self.stream_norm(stream), self.token_norm(token)), dim=-1)  # (B, S, 2 D)
        out: Tensor = self.block(self.join(both), ctx)
        return out

    def prepare(self, ctx: TokenContext, x: Tensor) -> None:
        """Let the block derive from ctx what it shares with the others."""
        prepare(self.block, ctx, x, None)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """How the projection begins, by its name in this module."""
        return linear_rows("join", self.join, std)

    def parallel_roles(self) -> dict[str, Any]:
        """Everything but the block sees tokens one by one."""
        names = ("stream_norm", "token_norm", "norm", "join")
        return {
            **{f"{name}.*": "sequence" for name in names},
            **dict(roles_of(self.block, "block")),
        }

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the projection and the block for one token."""
        return linear_flops(self.join) + forward_flops(self.block, seq_len)
