"""The MoE layer, forward and backward, next to other layers with the same weights and routes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.harness import ROOT
from benchmarks.rows import Row, Setting
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "packages/forge-moe/benchmarks"))  # routing_scenarios


class Layer(NamedTuple):
    """Case: Forge's layer, the input (1, T, D) and the gradient of the output."""

    ours: Any
    x: Tensor
    grad: Tensor


def layer(setting: Setting, tokens: int, dim: int, hidden: int, experts: int, dtype: torch.dtype, routing: str) -> Layer:  # fmt: skip
    """A layer whose router is the identity on the first E numbers of a token, so that the scenario chooses its experts."""
    from routing_scenarios import SCENARIOS, Shape

    from forge_moe import MoE, MoEConfig

    tokens, dim, hidden = (setting.of(n, max(16, n // 64)) for n in (tokens, dim, hidden))
    dim = max(dim, experts)
    torch.manual_seed(0)
    ours = MoE(MoEConfig(dim=dim, hidden_dim=hidden, num_experts=experts, top_k=2))
    with torch.no_grad():
        for weight in ours.experts.parameters():
            weight.normal_(std=weight.size(1) ** -0.5)
        ours.router.weight.copy_(torch.eye(experts, dim))
    ids = SCENARIOS[routing](Shape(tokens, experts, 2, 4), 1, 0)
    x = torch.randn(tokens, dim)
    x[:, :experts] = -4.0
    x.scatter_(1, ids, 4.0 - 0.5 * torch.arange(2).expand_as(ids))  # no ties
    x = x.to(setting.device, dtype).unsqueeze(0)
    return Layer(ours.to(setting.device, dtype), x, torch.randn_like(x))


def step(case: Layer, module: Any) -> Callable[[], Tensor]:
    """Forward and backward with new gradients; returns the output and the gradient of the input."""
    x, parameters = case.x.detach().clone().requires_grad_(), list(module.parameters())

    def run() -> Tensor:
        for tensor in (x, *parameters):
            tensor.grad = None
        y = module(x)
        y.backward(case.grad)
        return torch.cat([y.detach(), x.grad])  # type: ignore[list-item]

    return run


def forge(case: Layer) -> Callable[[], Tensor]:
    return step(case, case.ours)


class ByHand(nn.Module):
    """Routing as in Mixtral, tokens sorted by expert, and the experts' matmuls by `experts_of`."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.router = nn.Parameter(ours.router.weight.detach().clone())
        gate, up = ours.experts.gate_proj.detach(), ours.experts.up_proj.detach()
        self.gate_up = nn.Parameter(torch.cat((gate, up), 2))  # (E, D, 2 H)
        self.down = nn.Parameter(ours.experts.down_proj.detach().clone())  # (E, H, D)

    def forward(self, given: Tensor) -> Tensor:
        x = given[0]  # (T, D)
        weights, ids = F.linear(x.float(), self.router.float()).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        slots = ids.flatten()  # (T K,)
        order = slots.argsort(stable=True)
        token = order // 2
        out = self.experts_of(x[token], slots[order], slots.bincount(minlength=len(self.down)))
        out = out * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, out.to(x.dtype)).unsqueeze(0)

    def experts_of(self, rows: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        """Rows (T K, D) sorted by expert -> the same."""
        raise NotImplementedError


class Padded(ByHand):
    """Each expert gets as many rows as the fullest, and one bmm computes them all."""

    def experts_of(self, rows: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[expert]
        longest = int(counts.max())
        at = expert * longest + place
        padded = rows.new_zeros(len(counts) * longest, rows.size(1)).index_put((at,), rows)
        gate, up = (padded.view(len(counts), longest, -1) @ self.gate_up).chunk(2, -1)
        return ((F.silu(gate) * up) @ self.down).flatten(0, 1)[at]


class Packed(ByHand):
    """One expert after another on its slice of the sorted rows."""

    def experts_of(self, rows: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        found = []
        for part, gate_up, down in zip(
            rows.split(counts.tolist()), self.gate_up.unbind(), self.down.unbind()
        ):
            gate, up = (part @ gate_up).chunk(2, -1)
            found.append((F.silu(gate) * up) @ down)
        return torch.cat(found)


def padded(case: Layer) -> Callable[[], Tensor]:
    return step(case, Padded(case.ours))


def packed(case: Layer) -> Callable[[], Tensor]:
    return step(case, Packed(case.ours))


def transformers(case: Layer) -> Callable[[], Tensor]:
    """Mixtral's block with its grouped matmuls."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    c, experts = case.ours.config, case.ours.experts
    config = MixtralConfig(
        hidden_size=c.dim,
        intermediate_size=c.hidden_dim,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.top_k,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config).to(case.ours.router.weight)
    with torch.no_grad():
        block.gate.weight.copy_(case.ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((experts.gate_proj, experts.up_proj), 2).mT)
        block.experts.down_proj.copy_(experts.down_proj.mT)
    return step(case, block.train())


def torchtitan(case: Layer) -> Callable[[], Tensor]:
    """The MoE of torchtitan 0.3.0; it computes in bf16."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.moe import MoE as Titan
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    c, ours = case.ours.config, case.ours.experts
    size = {"num_experts": c.num_experts}
    inner = GroupedExperts.Config(dim=c.dim, hidden_dim=c.hidden_dim, **size)
    made = Titan.Config(
        **size,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            **size,
            gate=Linear.Config(in_features=c.dim, out_features=c.num_experts),
            top_k=c.top_k,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=inner,
            token_dispatcher=LocalTokenDispatcher.Config(top_k=c.top_k, **size),
        ),
    ).build()
    made = made.to(case.ours.router.weight)
    experts = made.routed_experts.inner_experts
    with torch.no_grad():
        made.router.gate.weight.copy_(case.ours.router.weight)
        experts.w1_EFD.copy_(ours.gate_proj.mT)
        experts.w3_EFD.copy_(ours.up_proj.mT)
        experts.w2_EDF.copy_(ours.down_proj.mT)
    return step(case, made.train())


_SIDES = {"forge": forge, "transformers": transformers, "padded": padded, "packed": packed}
_LARGE, _SMALL = (
    {"tokens": 4096, "dim": 512, "hidden": 1024},
    {"dim": 128, "hidden": 128, "experts": 16},
)
_CASES = [
    *((f"t4096-e{e}", routing, dtype, {**_LARGE, "experts": e})
      for e in (8, 64) for dtype in ("bf16", "fp32") for routing in ("balanced",)),
    ("t4096-e8", "hot_expert", "bf16", {**_LARGE, "experts": 8}),
    *((f"t{t}-e16", routing, "bf16", {**_SMALL, "tokens": t})
      for t in (64, 256, 1024) for routing in ("balanced", "ragged")),
]  # fmt: skip
_SMALL_CAUSE = (
    "both spend the most in bmm (of Forge's time 37 % at 64 tokens, 46 % at 256; 45 and 46 % of the peer's): gate and up are one "
    "weight there, two here, so six products are nine. Forge also sums in fp32 in the order of the choices, counts the tokens of "
    "each expert and keeps router statistics: 373 operators a step, 320 there, of 2 to 3 us each. A weight that holds both "
    "would change the checkpoint and the sharding of experts"
)
_DTYPES = {"bf16": (torch.bfloat16, 0.05), "fp32": (torch.float32, 1e-4)}
ROWS = [
    Row(
        f"moe-{name}-{dtype}-{routing}", layer,
        {**_SIDES, **({"torchtitan": torchtitan} if dtype == "bf16" else {})},
        f"{', '.join(f'{key} {value:,}' for key, value in shape.items())}, top 2, forward and backward; "
        "transformers: Mixtral's block with grouped_mm; padded: one bmm of experts padded to the fullest; packed: one expert after another; torchtitan: its MoE, softmax router, local dispatch",
        {**shape, "dtype": _DTYPES[dtype][0], "routing": routing}, tolerance=_DTYPES[dtype][1],
        causes={"padded": _SMALL_CAUSE},
    )
    for name, routing, dtype, shape in _CASES
]  # fmt: skip
