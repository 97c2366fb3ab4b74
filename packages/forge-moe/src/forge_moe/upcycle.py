"""Upcycling: experts initialized from a dense feed-forward, so that both compute the same function.

Each expert is a replica of the full feed-forward (Komatsuzaki et al. 2023, "Sparse upcycling") or of a slice of it, for
finer experts (He et al. 2024, "Upcycling large language models into mixture of experts").

Shapes: D width, F hidden width of the dense layer, H hidden width of an expert, E experts, K slots per token, G slices of
the dense layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_moe._shared.problems import Problem, invalid, raise_problems
from forge_moe.config import MoEConfig
from forge_moe.layer import MoE
from forge_moe.protocols import DenseFeedForward


@torch.no_grad()
def upcycle(dense: DenseFeedForward, moe: MoE, *, noise: float = 0.0, seed: int = 0) -> None:
    """Fill the experts of `moe` from `dense`, so that without noise both compute the same.

        upcycle(feed_forward, MoE(MoEConfig(dim=512, hidden_dim=1024, num_experts=8)))

    `dense` has linear layers `up_proj`, `down_proj` and, for SwiGLU, `gate_proj`, like the feed-forwards of Forge, Llama
    and Qwen. Shared experts take the first hidden neurons, the rest is split into G slices of the experts' width. Expert e
    holds slice e mod G, so G = 1 copies and G > 1 splits. The G experts of a replica have equal rows in the router, so a
    token chooses all or none; K is a multiple of G.

    `noise` adds normal noise to the routed experts' weights, with that fraction of each tensor's standard deviation and
    different in each expert, from `seed`; the function then changes by about as much.

    Equality holds while the capacity drops no slot. Call it before sharding. Raises ValueError for widths that do not
    fit, a router whose weights do not sum to a constant, biases on one side.
    """
    config = moe.config
    weights = _weights(dense)
    raise_problems("upcycle", _problems(config, weights))
    shared = config.resolved_shared_hidden_dim
    num_slices = (weights["up_proj"].size(0) - shared) // config.hidden_dim
    if shared:
        module: Any = moe.shared
        for name, weight in weights.items():
            getattr(module, name).weight.copy_(_hidden_units(name, weight, 0, shared))
        if config.shared_gate:  # with weight 0 the gate is sigmoid(0) = 1/2 for every token
            module.gate.weight.zero_()
            module.down_proj.weight.mul_(2.0)

    # The K weights of a token sum to route_scale over K / G replicas, so the weights of a slice sum to
    # route_scale / G: scale its down projection by the inverse.
    scale = num_slices / config.route_scale
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        slices = [  # of the (out, in) weight
            _hidden_units(name, weight, shared + g * config.hidden_dim, config.hidden_dim)
            for g in range(num_slices)
        ]
        stack = torch.stack(slices).repeat(config.num_experts // num_slices, 1, 1)  # (E, out, in)
        if name == "down_proj":
            stack *= scale
        if noise:
            stack += noise * stack.std() * torch.randn(stack.shape, generator=generator).to(stack)
        getattr(moe.experts, name).copy_(stack.mT)
    if num_slices > 1:
        moe.router.weight.copy_(moe.router.weight[::num_slices].repeat_interleave(num_slices, 0))


def _hidden_units(name: str, weight: Tensor, start: int, count: int) -> Tensor:
    """The rows (of gate and up) or columns (of down) of some hidden neurons of a linear weight."""
    return weight.narrow(1 if name == "down_proj" else 0, start, count)


def _weights(dense: DenseFeedForward) -> dict[str, Tensor]:
    """{"gate_proj": (F, D; SwiGLU only), "up_proj": (F, D), "down_proj": (D, F)}."""
    found: dict[str, Tensor] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear: Any = getattr(dense, name, None)
        if linear is None and name != "gate_proj":
            rule = f"is not in {type(dense).__name__}"
            fix = "give linear layers up_proj, down_proj and, if gated, gate_proj"
            raise invalid(name, "missing", ..., rule, fix, where="upcycle")
        if linear is not None:
            if linear.bias is not None:
                rule = "has a bias, which must be absent"
                raise invalid(name, "bias", ..., rule, "drop biases", where="upcycle")
            found[name] = linear.weight
    return found


def _problems(config: MoEConfig, weights: Mapping[str, Tensor]) -> Iterator[Problem]:
    """A problem for each option with which the experts would not compute the function of the dense layer."""
    hidden, dim = weights["up_proj"].shape
    activation = "swiglu" if "gate_proj" in weights else "gelu"
    if config.dim != dim:
        rule = "must equal that of the dense layer"
        yield Problem("dim", "mismatch", config.dim, rule, f"use {dim}")
    if config.activation != activation:
        rule, fix = "must equal that of the dense layer", f"use {activation!r}"
        yield Problem("activation", "mismatch", config.activation, rule, fix)
    if config.bias:
        rule = "must be false, as a bias would be added once per slot"
        yield Problem("bias", "unsupported", True, rule, "build the layer without")

    routed = hidden - config.resolved_shared_hidden_dim
    num_slices = routed // config.hidden_dim
    if num_slices >= 1 and num_slices * config.hidden_dim == routed:
        for name in ("num_experts", "top_k"):
            if (value := getattr(config, name)) % num_slices:
                rule = f"must be a multiple of the {num_slices} slices"
                yield Problem(name, "slices", value, rule, "round it up")
        if config.num_experts // config.num_groups % num_slices:
            rule = f"must keep the {num_slices} slices of a copy together"
            fix = f"use a divisor of {config.num_experts // num_slices}"
            yield Problem("num_groups", "splits", config.num_groups, rule, fix)
    else:
        rule = f"must divide the {routed} hidden units that shared experts leave of {hidden}"
        fix = f"use {max(routed, 1)} for copies, or a divisor of it"
        yield Problem("hidden_dim", "divides", config.hidden_dim, rule, fix)

    # A constant sum of a token's weights can be scaled away; any other sum would change the function.
    softmax_of_all = config.router == "softmax_topk" and config.top_k == config.num_experts
    constant_sum = config.normalize == "after_top_k" or softmax_of_all
    if config.router not in ("softmax_topk", "sigmoid_topk") or not constant_sum:
        rule = f"with normalize {config.normalize!r} must give weights of constant sum"
        fix = "use softmax_topk or sigmoid_topk with after_top_k and top_k 2 or more"
        yield Problem("router", "sum", config.router, rule, fix)
