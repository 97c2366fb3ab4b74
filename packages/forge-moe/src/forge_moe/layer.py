"""The mixture-of-experts layer.

Shapes: B rows of a batch, S tokens of a row, T = B S tokens, K slots per token, E experts, D width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe.config import MoEConfig
from forge_moe.dispatch import LocalDispatch
from forge_moe.experts import Experts
from forge_moe.routers import Router


class SharedExperts(nn.Module):
    """Experts that see every token, as one feed-forward of their widths together.

    Side by side or stacked is the same function: outputs of experts add up. With `gate`, a sigmoid of
    the token scales the sum (Qwen2-MoE).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        dim, hidden = config.dim, config.resolved_shared_hidden_dim
        gated = config.activation == "swiglu"
        self.gate_proj = nn.Linear(dim, hidden, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=config.bias)
        self.down_proj = nn.Linear(hidden, dim, bias=config.bias)
        self.gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.gate_proj is None:
            hidden = F.gelu(self.up_proj(x))
        else:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(hidden)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """How each parameter begins: (kind, value) by name."""
        table = {}
        for name, parameter in self.named_parameters():
            value = residual_std if name == "down_proj.weight" else std
            table[name] = ("constant", 0.0) if parameter.dim() == 1 else ("normal", value)
        return table


class MoE(nn.Module):
    """A feed-forward made of experts, of which each token visits `top_k`.

        moe = MoE(MoEConfig(dim=512, hidden_dim=1024, num_experts=8, top_k=2))
        y = moe(x)                                                # (B, S, D) or (T, D), same shape out

    `moe.router`, `moe.experts`, `moe.shared` (or None) and `moe.dispatcher` may be replaced.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.router_config)
        self.experts = Experts(config)
        self.shared = SharedExperts(config) if config.num_shared_experts else None
        self.dispatcher: Any = LocalDispatch(config.num_experts)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        """x (B, S, D) or (T, D) -> the same shape and dtype."""
        flat = x.reshape(-1, x.size(-1))
        routed = self.router.route(flat)
        out, shared = self._through_experts(flat, routed.weights, routed.ids, placed=True)
        if shared is not None:
            out = out + shared
        return out.to(x.dtype).view(x.shape)

    def _through_experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, *, placed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sum of the routed experts (T, D) fp32, and the shared experts' output or None."""
        meanwhile = None if self.shared is None else lambda: cast(nn.Module, self.shared)(x)
        run: Any = getattr(self.dispatcher, "run", None)
        if run is not None:
            return run(x, weights, ids, self.experts, meanwhile)
        sent = self.dispatcher.dispatch(x, weights, ids)
        full = sent.full or (placed and type(self.dispatcher) is LocalDispatch)
        rows = self.experts(sent.rows, sent.counts, full=full)
        shared = None if meanwhile is None else meanwhile()
        return self.dispatcher.combine(rows, sent.meta), shared

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """How each parameter and buffer begins: (kind, value) by name."""
        table: dict[str, tuple[str, float]] = {"router.weight": ("normal", std)}
        for name in ("experts", "shared"):
            module: Any = getattr(self, name)
            rows = {} if module is None else module.init_table(std, residual_std)
            table |= {f"{name}.{key}": row for key, row in rows.items()}
        if self.router.expert_bias is not None:
            table["router.expert_bias"] = ("constant", 0.0)
        return table

    def parallel_roles(self) -> dict[str, str]:
        """Role of each parameter under tensor and expert parallelism, by pattern."""
        roles = {"router.*": "opaque", "experts.*": "expert"}
        if self.shared is not None:
            if self.shared.gate_proj is not None:
                roles["shared.gate_proj.*"] = "colwise"
            roles |= {"shared.up_proj.*": "colwise", "shared.down_proj.*": "rowwise"}
            if self.shared.gate is not None:
                roles["shared.gate.*"] = "opaque"
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the matrix products for one token: router, top_k experts, shared experts."""
        c = self.config
        matrices = 3 if c.activation == "swiglu" else 2
        inside = c.top_k * c.hidden_dim + c.resolved_shared_hidden_dim
        return 2.0 * c.dim * (c.num_experts + matrices * inside + int(c.shared_gate))
