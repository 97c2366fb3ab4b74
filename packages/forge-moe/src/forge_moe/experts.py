"""Experts: a stack of feed-forwards, each applied to its own rows.

Shapes: R rows sorted by expert, E experts of this process, D width, F width inside an expert.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forge_moe._shared.parameter_kinds import ParameterKind
from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import autocast_dtype
from forge_moe.config import MoEConfig
from forge_moe.gemm import GroupedFeedForward, Groups, choose_backend
from forge_moe.gemm.activations import Activation, ClampedSwiGLU, Gelu


class Experts(nn.Module):
    """Experts of one activation as 3-D parameters.

        experts(rows, counts)   # rows (R, D) sorted by expert, counts (E,) ints on the device -> (R, D)

    `gate_proj` (E, D, F; SwiGLU only), `up_proj` (E, D, F), `down_proj` (E, F, D), with biases `*_bias`
    (E, F), (E, F), (E, D). Of activation "clamped_swiglu" `gate_up_proj` (E, D, 2 F) has the columns of gate and
    up in turns, and `gate_up_proj_bias` (E, 2 F). A matrix is stored as the right factor of rows: x @ up_proj[e]. Parameters may
    be DTensors sharded on dim 0: this process then holds and computes its own E experts.

    Rows beyond counts.sum() are a tail: not computed, zero in the output, without gradient, even if they
    hold NaN. An expert without rows gets an exact zero gradient, so every parameter always has one. Under
    autocast rows and matrices are cast to its dtype. No host sync with `grouped_mm`, one otherwise.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        num, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        gated, fused = config.activation == "swiglu", config.activation == "clamped_swiglu"
        bias = config.bias

        def stack(exists: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num, *shape)) if exists else None

        self.gate_proj = stack(gated, dim, hidden)
        self.gate_up_proj = stack(fused, dim, 2 * hidden)
        self.up_proj = stack(not fused, dim, hidden)
        self.down_proj = nn.Parameter(torch.empty(num, hidden, dim))
        self.gate_proj_bias = stack(bias and gated, hidden)
        self.gate_up_proj_bias = stack(bias and fused, 2 * hidden)
        self.up_proj_bias = stack(bias and not fused, hidden)
        self.down_proj_bias = stack(bias, dim)
        self.activation: Activation = (
            ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit) if fused else Gelu()
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, also after `to_empty`: matrices normal with std 0.02, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor, *, full: bool = False) -> Tensor:
        """Rows (R, D) through their experts. `full` promises that counts.sum() is R, which saves two passes."""
        dtype = autocast_dtype(rows) or rows.dtype
        up_name = "up_proj" if self.gate_up_proj is None else "gate_up_proj"
        names = ("gate_proj", up_name, "down_proj")
        weights = [_local(getattr(self, name), dtype) for name in names]
        biases = [_local(getattr(self, f"{name}_bias"), dtype) for name in names]
        up = weights[1]
        assert up is not None
        if counts.numel() != up.size(0):
            rule = f"must be ({up.size(0)},): one number of rows per expert here"
            raise invalid("counts", "shape", tuple(counts.shape), rule)
        rows = rows.to(dtype)
        widths = (self.config.dim, self.config.hidden_dim)
        backend = choose_backend(self.config.backend, rows, widths)
        groups = Groups.of(counts, host_sizes=backend.needs_host_sizes, full=full)
        return GroupedFeedForward.apply(rows, *weights, *biases, groups, backend, self.activation)

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """What each parameter is, for weight decay and Muon: biases (E, F) are a vector for each expert."""
        return {
            name: "stacked_bias" if name.endswith("_bias") else "stacked_matrix"
            for name, _ in self.named_parameters()
        }

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """Initial distribution of each parameter: (kind, value) by name. down_proj writes to the residual stream."""
        values = dict.fromkeys(("gate_proj", "gate_up_proj", "up_proj"), std)
        values["down_proj"] = residual_std
        return {
            name: ("normal", values[name]) if name in values else ("constant", 0.0)
            for name, _ in self.named_parameters()
        }

    def extra_repr(self) -> str:
        """Number and shape, for print(model)."""
        c = self.config
        return f"{c.num_experts} x ({c.dim} -> {c.hidden_dim} -> {c.dim}), {c.activation}"


def _local(parameter: Any, dtype: torch.dtype) -> Tensor | None:
    """This process's part of a parameter, in the compute dtype."""
    if parameter is None:
        return None
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.to(dtype)
