"""The MoE layer, forward and backward, beside other layers with the same weights and routes.

    python packages/forge-moe/benchmarks/moe_layer.py --experts 8 64 --dtypes fp32 bf16

Alternatives: `transformers`' Mixtral block with its grouped matrix product and with its own loop (if
installed), a batched product over experts padded to the fullest, a loop over experts (unbound, so that
its backward is not quadratic in experts), torchtitan's layer (if importable; it computes in bf16 whatever
it is given, so it has no fp32 row). Routes are exact, balanced or with one expert in every token: inputs
hold a score for each expert in their first E numbers, and the router is the identity on them. Rounds
are interleaved; `speedup` is the median with quartiles of the other's time over ours within a round.
Outputs and input gradients are compared with ours first: `difference`, the larger max|a - b| / max|b|.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import torch
import torch.nn.functional as F
from routing_scenarios import SCENARIOS, Shape
from torch import Tensor, nn

from forge_moe import MoE, MoEConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Layer = Callable[[Tensor], Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--hidden-dim", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--routings", nargs="+", default=["balanced", "hot_expert"])
    parser.add_argument(
        "--backends", nargs="+", default=["auto"], help="ours; the first is compared"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        help="alternatives left out: with 64 experts and a hot one, padding takes 30 times as long",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    return parser.parse_args()


class Padded(nn.Module):
    """Every expert gets as many rows as the fullest, and one bmm does them all."""

    def __init__(self, ours: MoE) -> None:
        super().__init__()
        self.router = ours.router.weight
        self.gate, self.up = ours.experts.gate_proj, ours.experts.up_proj
        self.down = ours.experts.down_proj
        self.top_k = ours.config.top_k

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids (T, K), as Mixtral chooses them."""
        shares = F.linear(x.float(), self.router.float()).softmax(-1)
        weights, ids = shares.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        """x (1, T, D) -> the same."""
        x = x[0]
        weights, ids = self.route(x)
        experts = self.router.size(0)
        slots = ids.flatten()  # (T K,)
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=experts)
        first = counts.cumsum(0) - counts
        place = torch.arange(slots.numel(), device=x.device) - first[slots[order]]
        at = slots[order] * counts.max() + place  # where the sorted slots lie among padded rows
        token = order // self.top_k
        rows = x.new_zeros(experts * int(counts.max()), x.size(1)).index_put((at,), x[token])
        rows = rows.view(experts, -1, x.size(1))  # (E, fullest, D)
        out = (F.silu(rows @ self.gate) * (rows @ self.up)) @ self.down
        out = out.flatten(0, 1)[at] * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, out.to(x.dtype)).unsqueeze(0)


class Looped(Padded):
    """One expert after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """x (1, T, D) -> the same."""
        x = x[0]
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        matrices = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind())
        for e, (gate, up, down) in enumerate(matrices):
            token, slot = (ids == e).nonzero(as_tuple=True)
            rows = x[token]
            out = (F.silu(rows @ gate) * (rows @ up)) @ down
            y = y.index_add(0, token, (out * weights[token, slot, None]).to(x.dtype))
        return y.unsqueeze(0)


def forge(args: argparse.Namespace, experts: int, dtype: torch.dtype, backend: str) -> MoE:
    config = MoEConfig(
        dim=args.dim,
        hidden_dim=args.hidden_dim,
        num_experts=experts,
        top_k=args.top_k,
        backend=backend,  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    layer = MoE(config)
    with torch.no_grad():
        for weight in layer.experts.parameters():
            weight.normal_(std=weight.size(1) ** -0.5)
        layer.router.weight.copy_(torch.eye(experts, args.dim))
    return layer.to(args.device, dtype)


def mixtral(ours: MoE, implementation: str) -> Layer:
    """`transformers`' block with our weights; "grouped_mm" or "eager", its loop."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    c = ours.config
    config = MixtralConfig(
        hidden_size=c.dim,
        intermediate_size=c.hidden_dim,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.top_k,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).to(ours.router.weight)
    experts = ours.experts
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((experts.gate_proj, experts.up_proj), 2).mT)
        block.experts.down_proj.copy_(experts.down_proj.mT)
    return block.train()


def torchtitan(ours: MoE) -> Layer:
    """torchtitan 0.3.0's MoE with our weights."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.moe import MoE as Titan
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    c = ours.config
    layer = Titan.Config(
        num_experts=c.num_experts,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=c.num_experts,
            gate=Linear.Config(in_features=c.dim, out_features=c.num_experts),
            top_k=c.top_k,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=c.dim, hidden_dim=c.hidden_dim, num_experts=c.num_experts
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=c.num_experts, top_k=c.top_k),
        ),
    ).build()
    layer = layer.to(ours.router.weight)
    experts = layer.routed_experts.inner_experts
    with torch.no_grad():
        layer.router.gate.weight.copy_(ours.router.weight)
        experts.w1_EFD.copy_(ours.experts.gate_proj.mT)
        experts.w3_EFD.copy_(ours.experts.up_proj.mT)
        experts.w2_EDF.copy_(ours.experts.down_proj.mT)
    return layer.train()


def alternatives(
    ours: MoE, bf16: bool, without: list[str]
) -> tuple[dict[str, Layer], dict[str, str]]:
    """Other layers by name, and why some are missing."""
    makers: dict[str, Callable[[], Layer]] = {
        "transformers": lambda: mixtral(ours, "grouped_mm"),
        "transformers_eager": lambda: mixtral(ours, "eager"),
        "padded": lambda: Padded(ours),
        "loop": lambda: Looped(ours),
    }
    if bf16:
        makers["torchtitan"] = lambda: torchtitan(ours)
    made, missing = {}, {}
    for name, make in makers.items():
        if name in without:
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                made[name] = make()
        except ImportError as error:
            missing[name] = str(error)
    return made, missing


def inputs(args: argparse.Namespace, experts: int, dtype: torch.dtype, routing: str) -> Tensor:
    """Tokens (1, T, D) that the identity router sends where the scenario says."""
    ids = SCENARIOS[routing](Shape(args.tokens, experts, args.top_k, 4), 1, 0)
    x = torch.randn(args.tokens, args.dim, generator=torch.Generator().manual_seed(1))
    x[:, :experts] = -4.0
    x.scatter_(1, ids, 4.0 - 0.5 * torch.arange(args.top_k).expand_as(ids))  # no ties
    return x.to(args.device, dtype).unsqueeze(0).requires_grad_()


def step(layer: Layer, x: Tensor, seed: Tensor) -> Callable[[], Tensor]:
    """Forward and backward; gradients of inputs and weights are made anew each time."""
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []

    def run() -> Tensor:
        for tensor in (x, *parameters):
            tensor.grad = None
        y = layer(x)
        y.backward(seed)
        return y.detach()

    return run


def answers(run: Callable[[], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input."""
    y = run().double()
    assert x.grad is not None
    return y, x.grad.double()


def difference(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted))


def row(args: argparse.Namespace, experts: int, name: str, routing: str) -> dict[str, Any]:
    dtype = DTYPES[name]
    x = inputs(args, experts, dtype, routing)
    seed = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
    layers: dict[str, Layer] = {
        f"forge_{backend}": forge(args, experts, dtype, backend) for backend in args.backends
    }
    ours, first = next(iter(layers.items()))
    others, missing = alternatives(first, dtype == torch.bfloat16, args.without)
    layers |= others
    steps = {key: step(layer, x, seed) for key, layer in layers.items()}
    wanted = answers(steps[ours], x)
    errors = {key: difference(answers(run, x), wanted) for key, run in steps.items()}
    device = torch.device(args.device)
    seconds = harness.interleave(steps, args.rounds, args.warmup, device)
    return {
        "experts": experts,
        "dtype": name,
        "routing": routing,
        "milliseconds": {
            key: {part: value * (1 if part == "n" else 1e3) for part, value in spread.items()}
            for key, spread in ((k, harness.spread(times)) for k, times in seconds.items())
        },
        "speedup": {key: harness.ratios(seconds[key], seconds[ours]) for key in others},
        "difference": errors,
        "syncs": harness.count(steps[ours], device)["syncs"],
        "missing": missing,
    }


def main() -> None:
    args = arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = [
        row(args, experts, dtype, routing)
        for experts in args.experts
        for dtype in args.dtypes
        for routing in args.routings
    ]
    harness.emit("moe_layer", torch.device(args.device), settings=vars(args), rows=rows)


if __name__ == "__main__":
    main()
