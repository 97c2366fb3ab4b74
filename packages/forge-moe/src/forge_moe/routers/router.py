"""A router: logits in fp32, a choice of experts by a rule, weights with a gradient.

Shapes: T tokens, D width, E experts, K slots per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe._shared.parameter_kinds import ParameterKind
from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import without_autocast
from forge_moe.config import RouterConfig
from forge_moe.replay import record_or_replay
from forge_moe.routers.registry import find_rule


class Routed(NamedTuple):
    """The decision of a router. weights (T, K) fp32, differentiable, 0 where the id is E; ids (T, K) int64
    in 0..E, E = nowhere (pads, dropped); probabilities (T, E) fp32, rows sum to 1; logits (T, E) fp32."""

    weights: Tensor
    ids: Tensor
    probabilities: Tensor
    logits: Tensor


class Router(nn.Module):
    """A router that can be used alone.

        weights, ids = Router(RouterConfig(dim=512, num_experts=64, name="sigmoid_topk", top_k=6))(x)

    x (T, D) of any float dtype; logits, scores and weights are computed in fp32 (fp64 for fp64), under
    autocast too. `bias` is that of the projection, None unless the config has `router_bias`. `expert_bias` is an fp32 buffer, None unless the config enables it: no optimizer updates
    it, and no cast of the module changes its dtype. No host sync.
    """

    compute_dtype = torch.float32
    """Under FSDP's mixed precision the weight must stay in this dtype: the router is wrapped by itself."""
    forward_methods = ("route",)
    """Methods beside `forward` that read parameters, for `register_fsdp_forward_method`."""
    points = ("router_logits",)
    """What `forge_core.interp` may read and change: (T, E) fp32."""
    expert_bias: Tensor | None

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.rule = find_rule(config.name)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        self.register_buffer(
            "expert_bias",
            torch.zeros(config.num_experts, dtype=torch.float32) if config.expert_bias else None,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, also after `to_empty`: the weight normal with std 0.02, biases 0."""
        nn.init.normal_(self.weight, std=0.02)
        for bias in (self.bias, self.expert_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights (T, K) fp32, ids (T, K) int64) of tokens x (T, D)."""
        routed = self.route(x)
        return routed.weights, routed.ids

    def route(self, x: Tensor, valid: Tensor | None = None, rows: int | None = None) -> Routed:
        """Experts of tokens x (T, D); those with valid (T,) False go nowhere.

        `rows`: the number of rows in x, one after another, each of T / rows tokens. Only a rule that is not
        causal needs it, in eval, where it chooses within each row. Raises ValueError for a wrong shape, and
        for such a rule without rows.
        """
        if x.dim() != 2:
            rule, fix = f"must be (T, {self.config.dim})", "flatten it to one row per token"
            raise invalid("x", "dims", tuple(x.shape), rule, fix)
        check_tokens(x, self.config.dim)
        if self.rule.causal or self.training:
            rows = 1  # the choice is over all tokens of the call
        elif rows is None:
            rule = f"must be given in eval: router {self.config.name!r} chooses within each row"
            fix = "give the layer (B, S, D), or the router rows = B"
            raise invalid("rows", "missing", rows, rule, fix)
        logits = self.point("router_logits", self._logits(x))
        scores = self.rule.score(logits)
        # The choice has no gradient, and a recomputation takes it from the record.
        ids = record_or_replay(self, "ids", lambda: self._choose(scores.detach(), valid, rows))
        nowhere = ids == self.config.num_experts
        # Id E would be out of range in a gather: read expert 0 and set the weight to 0.
        weights = self.rule.weigh(logits, scores, ids.masked_fill(nowhere, 0), self.config)
        return Routed(
            weights=weights.masked_fill(nowhere, 0.0),
            ids=ids,
            probabilities=scores if self.rule.normalized else _normalize(scores),
            logits=logits,
        )

    def point(self, name: str, value: Tensor) -> Tensor:
        """`value` itself; inside `forge_core.interp` what is put in its place."""
        return value

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """What each parameter is, for weight decay and Muon."""
        bias: dict[str, ParameterKind] = {} if self.bias is None else {"bias": "bias"}
        return {"weight": "matrix", **bias}

    def _logits(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), self.weight.to(dtype), bias)  # (T, E)

    @torch.no_grad()
    def _choose(self, scores: Tensor, valid: Tensor | None, rows: int) -> Tensor:
        selection = scores if self.expert_bias is None else scores + self.expert_bias
        mask = scores.new_ones(scores.size(0), dtype=torch.bool) if valid is None else valid
        parts = zip(selection.tensor_split(rows), mask.tensor_split(rows))
        ids = torch.cat([self.rule.choose(part, self.config, of_part) for part, of_part in parts])
        if valid is None:
            return ids
        return ids.masked_fill(~valid.unsqueeze(1), self.config.num_experts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # A bf16 bias would round away steps of 1e-3: `.bfloat16()` moves it between devices at most.
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None:
            after = self.expert_bias
            if after.dtype != torch.float32:
                self.expert_bias = before.to(after.device)
        return self


def check_tokens(x: Tensor, dim: int) -> None:
    """Raise ValueError unless x (..., D) holds tokens of width `dim`."""
    if not x.is_floating_point():
        fix = "give embeddings, not token ids"
        raise invalid("x", "dtype", x.dtype, "must be floating point", fix)
    if x.dim() < 2 or x.size(-1) != dim:
        rule = f"must be (..., {dim}), tokens of the width dim {dim} that the layer was built for"
        fix = f"build it with dim = {x.shape[-1] if x.dim() else 1}, or project x to {dim}"
        raise invalid("x", "shape", tuple(x.shape), rule, fix)


def _normalize(scores: Tensor) -> Tensor:
    return scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
