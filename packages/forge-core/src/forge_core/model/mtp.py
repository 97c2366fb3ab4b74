"""Multi-token prediction (MTP, DeepSeek-V3 2024, section 2.2): modules after the blocks that predict later tokens.

They run in training only. Shapes: B sequences, S tokens, D width of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core._config import is_size, number_problems
from forge_core._renamed import renamed
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems
from forge_core.flops import forward_flops, linear_flops
from forge_core.model.block import prepare, roles_of
from forge_core.model.context import TokenContext
from forge_core.model.init import Init, linear_rows, reset_children
from forge_core.model.norm import build_norm

if TYPE_CHECKING:
    from forge_core.model.config import TransformerConfig


@dataclass(frozen=True)
class MTPConfig:
    """Number and loss weight of the modules: `MTPConfig(num_modules=1, weight=0.3)`."""

    num_modules: int = field(
        0,
        "modules, of which the k-th predicts the token k + 1 ahead; 0: none; not run in evaluation",
    )
    weight: float = field(
        0.3,
        "weight of the mean of their losses, next to the loss of the next token and with its normalizer",
    )

    def __post_init__(self) -> None:
        raise_problems("mtp", _mtp_problems(self))


def _mtp_problems(c: MTPConfig) -> Iterator[Problem]:
    if c.num_modules != 0 and not is_size(c.num_modules, 64):
        rule = "must be a whole number from 0 to 64"
        yield Problem("num_modules", "range", c.num_modules, rule, "use 1")
    yield from number_problems(c, 0, {"weight": "use 0.3"})


class MTPModule(nn.Module):
    """One MTP module: the next stream from the previous one and the embedding of a later token.

    h (B, S, D), e (B, S, D) -> block(join([stream_norm(h); token_norm(e)])) (B, S, D), equations 21 and 22. `norm`
    comes before the head. Embedding and head are those of the model.
    """

    def __init__(self, config: TransformerConfig, block: nn.Module) -> None:
        super().__init__()
        self.stream_norm, self.token_norm, self.norm = (build_norm(config) for _ in range(3))
        self.join = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = block

    def forward(self, stream: Tensor, token: Tensor, ctx: TokenContext) -> Tensor:
        both = torch.cat((self.stream_norm(stream), self.token_norm(token)), dim=-1)  # (B, S, 2 D)
        return self.block(self.join(both), ctx)

    def reset_parameters(self) -> None:
        """Draw initial values of projection, norms and block; see also `forge_core.initialize`."""
        reset_children(self)

    def prepare(self, ctx: TokenContext, x: Tensor) -> None:
        """Let the block derive from ctx what all layers share."""
        prepare(self.block, ctx, x, None)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Initial value of the projection."""
        return linear_rows("join", self.join, std)

    def parallel_roles(self) -> dict[str, Any]:
        """Tensor-parallel roles: all but the block computes each token by itself."""
        names = ("stream_norm", "token_norm", "norm", "join")
        return {
            **{f"{name}.*": "sequence" for name in names},
            **dict(roles_of(self.block, "block")),
        }

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the projection and the block for one token."""
        return linear_flops(self.join) + forward_flops(self.block, seq_len)


__getattr__ = renamed(__name__)
