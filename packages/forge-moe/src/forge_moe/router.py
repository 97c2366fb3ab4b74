"""Routing: the experts of each token, and the weights of their outputs.

A `RoutingRule` scores the experts, chooses some of them without a gradient, and weights the choice with one. They are
separate functions so that a recomputed forward can weight the recorded choice. `Router` holds the parameters.

Shapes: T tokens, D width, E experts, G groups of experts, K slots per token. An expert id of E marks a dropped slot: a
pad, or a token over the capacity of its expert.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe._registered import find_registered
from forge_moe._shared.module_arguments import FromConfig, config_arguments
from forge_moe._shared.parameter_kinds import ParameterKind
from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import without_autocast
from forge_moe.config import RouterConfig
from forge_moe.protocols import Choose, Score, Weigh
from forge_moe.replay import record_or_replay

__all__ = ["Router", "RoutingResult", "RoutingRule", "find_rule"]


class RoutingResult(NamedTuple):
    """The experts of T tokens.

    weights (T, K) fp32, differentiable, 0 for dropped slots; ids (T, K) int64 in 0..E, E for dropped slots;
    probabilities (T, E) fp32, each token's sum is 1; logits (T, E) fp32.
    """

    weights: Tensor
    ids: Tensor
    probabilities: Tensor
    logits: Tensor


class RoutingRule(NamedTuple):
    """Three functions (`forge_moe.protocols`) and four properties of them.

    `normalized`: the scores of a token sum to 1. `causal` is False if a token's experts depend on other tokens: in eval
    `choose` then gets one sequence of (B, S, D) at a time, and a KV cache is rejected. `max_slots(T, config)` bounds the
    slots that are not dropped, if they are fewer than ids has. `routes_all_slots` promises that no slot of a valid
    token is dropped.
    """

    score: Score
    choose: Choose
    weigh: Weigh
    normalized: bool = False
    causal: bool = True
    max_slots: Callable[[int, RouterConfig], int] | None = None
    routes_all_slots: bool = False


class Router(FromConfig, nn.Module):
    """A router that can be used without a layer.

        weights, ids = Router(dim=512, num_experts=64, name="sigmoid_topk", top_k=6)(x)

    Keywords are the fields of `RouterConfig`, `device` and `dtype`; `Router(config)` takes a config. `weight` is (E, D).
    x (T, D) of any float dtype; logits, scores and weights are computed in fp32 (fp64 for fp64), under autocast too.
    `bias` belongs to the projection, and is None unless the config has `router_bias`. `expert_bias` is an fp32 buffer,
    None unless the config enables it: no optimizer updates it, and no cast of the module changes its dtype. No host
    sync.
    """

    compute_dtype = torch.float32
    """Under FSDP's mixed precision the weight must stay in this dtype: the router is wrapped by itself."""
    forward_methods = ("route",)
    """Methods other than `forward` that read parameters, for `register_fsdp_forward_method`."""
    points = ("router_logits",)
    """Activations that `forge_core.interp` may read and change: (T, E) fp32."""
    expert_bias: Tensor | None

    @config_arguments(RouterConfig)
    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.rule = find_rule(config.name)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        expert_bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", expert_bias if config.expert_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, also after `to_empty`: the weight normal with std 0.02, biases 0."""
        nn.init.normal_(self.weight, std=0.02)
        for bias in (self.bias, self.expert_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights (..., K) fp32, ids (..., K) int64) of tokens x (..., D); x (B, S, D) are B sequences."""
        routed = self.route(x.reshape(-1, x.shape[-1]), rows=len(x) if x.dim() == 3 else None)
        shape = (*x.shape[:-1], routed.ids.shape[-1])
        return routed.weights.reshape(shape), routed.ids.reshape(shape)

    def route(
        self, x: Tensor, valid: Tensor | None = None, rows: int | None = None
    ) -> RoutingResult:
        """Route tokens x (T, D); those with valid (T,) False are dropped.

        `rows`: the number of sequences in x, one after another, each of T / rows tokens. Only a rule that is not
        causal needs it, in eval, where it chooses within each sequence. Raises ValueError for a wrong shape, and for
        such a rule without rows.
        """
        if x.dim() != 2:
            rule, fix = f"must be (T, {self.config.dim})", "flatten it, or call the router"
            raise invalid("x", "dims", tuple(x.shape), rule, fix)
        check_tokens(x, self.config.dim)
        if self.rule.causal or self.training:
            rows = 1  # the choice is over all tokens of the call
        elif rows is None:
            rule = f"must be given in eval: router {self.config.name!r} chooses within each row"
            fix = "give the layer (B, S, D), or the router rows = B"
            raise invalid("rows", "missing", rows, rule, fix)

        logits = self.point("router_logits", self._logits(x))  # (T, E)
        scores = self.rule.score(logits)
        # The choice has no gradient, and a recomputation takes it from the record.
        ids = record_or_replay(self, "ids", lambda: self._choose(scores.detach(), valid, rows))

        if valid is None and self.rule.routes_all_slots:
            weights = self.rule.weigh(logits, scores, ids, self.config)
        else:
            # Id E would be out of range in a gather: read expert 0 and set the weight to 0.
            dropped = ids == self.config.num_experts
            weights = self.rule.weigh(logits, scores, ids.masked_fill(dropped, 0), self.config)
            weights = weights.masked_fill(dropped, 0.0)
        if self.rule.normalized:
            probabilities = scores
        else:
            probabilities = scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return RoutingResult(weights, ids, probabilities, logits)

    def point(self, name: str, value: Tensor) -> Tensor:
        """Return `value`; `forge_core.interp` replaces this method to read or change it."""
        return value

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Kind of each parameter, for weight decay and Muon."""
        bias: dict[str, ParameterKind] = {} if self.bias is None else {"bias": "bias"}
        return {"weight": "matrix", **bias}

    def extra_repr(self) -> str:
        """Sizes and rule, for print(model)."""
        c = self.config
        return f"{c.dim} -> {c.num_experts}, {c.name}, top_k={c.top_k}"

    def _logits(self, x: Tensor) -> Tensor:
        # bf16 logits would make ties of experts whose scores differ by less than 2^-8.
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), self.weight.to(dtype), bias)

    @torch.no_grad()
    def _choose(self, scores: Tensor, valid: Tensor | None, rows: int) -> Tensor:
        selection = scores if self.expert_bias is None else scores + self.expert_bias
        mask = scores.new_ones(scores.size(0), dtype=torch.bool) if valid is None else valid
        choose = self.rule.choose
        if rows == 1:
            ids = choose(selection, self.config, mask)
        else:
            sequences = zip(selection.tensor_split(rows), mask.tensor_split(rows))
            ids = torch.cat([choose(each, self.config, used) for each, used in sequences])
        return ids if valid is None else ids.masked_fill(~valid[:, None], self.config.num_experts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # A bf16 bias would round away steps of 1e-3: `.bfloat16()` moves it between devices at most.
        before = self.expert_bias
        super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != torch.float32:
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


# ---- choices by token


def top_k_ids(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores of each token, best first: (T, E) -> (T, K) int64. No autograd, no host sync.

    Exact ties go to the lower id on every device. `torch.topk` does not define the order of equal values, so a CPU and
    a GPU, or two shapes of a batch, might route the same token differently. Here the id is part of the sort key.
    """
    scores = scores.detach()
    if scores.dtype == torch.float64:  # 64 bits leave no room for the id
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]

    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    # Bits of positive floats sort as integers; those of negative ones sort in reverse, so flip all but the sign.
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    num = scores.size(-1)
    lower_first = torch.arange(num - 1, -1, -1, device=scores.device)
    key = ordered.to(torch.int64).mul_(num).add_(lower_first)  # (T, E), all different
    return key.topk(k, dim=-1).indices


def within_best_groups(
    scores: Tensor, num_groups: int, top_groups: int, group_score: str
) -> Tensor:
    """Scores (T, E) with -inf outside the `top_groups` best groups of each token (DeepSeek-V3, 2.1.2).

    A group is E / G neighboring experts; its score is the sum of its two best ("top2_sum", V3) or its best ("max", V2).
    """
    if top_groups == num_groups:
        return scores
    grouped = scores.unflatten(-1, (num_groups, -1))  # (T, G, E / G)
    if group_score == "max" or grouped.size(-1) == 1:
        strength = grouped.amax(-1)
    else:
        strength = grouped.topk(2, dim=-1).values.sum(-1)  # (T, G)
    best = top_k_ids(strength, top_groups)  # (T, top_groups)
    outside = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


def _choose_by_token(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    allowed = within_best_groups(scores, config.num_groups, config.top_groups, config.group_score)
    return top_k_ids(allowed, config.top_k)


def _softmax(logits: Tensor) -> Tensor:
    return F.softmax(logits, dim=-1)


def _weigh_softmax(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    if config.normalize == "before_top_k":
        return scores.gather(1, ids) * config.route_scale
    # The softmax of the chosen logits is the renormalized softmax, and cannot underflow to 0 / 0.
    weights = logits.gather(1, ids).softmax(dim=-1)
    return weights if config.route_scale == 1.0 else weights * config.route_scale


def _weigh_sigmoid(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    chosen = scores.gather(1, ids)  # (T, K)
    if config.normalize == "after_top_k":
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * config.route_scale


SOFTMAX_TOPK = RoutingRule(
    _softmax, _choose_by_token, _weigh_softmax, normalized=True, routes_all_slots=True
)
"""Softmax, k best experts of the token: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2."""

SIGMOID_TOPK = RoutingRule(torch.sigmoid, _choose_by_token, _weigh_sigmoid, routes_all_slots=True)
"""Sigmoid scores, the bias only selects, the weights come from unbiased scores (DeepSeek-V3, 2.1.2)."""


# ---- choices that depend on other tokens


def _tokens_per_expert(tokens: int, config: RouterConfig) -> int:
    return min(tokens, -(-tokens * config.top_k // config.num_experts))


def _choose_by_expert(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    """Each expert takes its T K / E best tokens, T without pads; a token has E slots, most of them dropped."""
    tokens, num = scores.shape
    capacity = _tokens_per_expert(tokens, config)
    masked = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
    best = top_k_ids(masked.T, capacity)  # (E, capacity): tokens, the best first

    # Pads count in `capacity`, a static shape, and not in `limit`, which stays on the device: no host sync.
    limit = (valid.sum() * config.top_k + num - 1) // num
    within = torch.arange(capacity, device=scores.device) < limit
    taken = torch.zeros(num, tokens, dtype=torch.bool, device=scores.device)
    taken.scatter_(1, best, within.expand(num, capacity))

    ids = torch.arange(num, device=scores.device).expand(tokens, num)
    return ids.masked_fill(~taken.T, num)  # (T, E)


def _weigh_by_score(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    return scores.gather(1, ids) * config.route_scale


def _round_robin(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    first = valid.cumsum(0).sub(1).unsqueeze(1) * config.top_k  # (T, 1), counting valid tokens
    return (first + torch.arange(config.top_k, device=scores.device)) % config.num_experts


EXPERT_CHOICE = RoutingRule(
    _softmax,
    _choose_by_expert,
    _weigh_by_score,
    normalized=True,
    causal=False,
    max_slots=lambda tokens, config: _tokens_per_expert(tokens, config) * config.num_experts,
)
"""Each expert chooses tokens (Zhou et al. 2022): in training among all of a call, in eval within each sequence.
A token's experts depend on later tokens, so it scores sequences but cannot generate. ids has E slots per token, of which
T K in sum are not dropped."""

UNIFORM = RoutingRule(
    _softmax, _round_robin, _weigh_softmax, normalized=True, causal=False, routes_all_slots=True
)
"""Experts round-robin, independent of the scores: perfect balance for benchmarks. Over all tokens of a call in training,
over each sequence in eval; a token's experts depend on the number of tokens before it, so it cannot generate."""


# ---- rules by name

_BUILT_IN = {
    "softmax_topk": SOFTMAX_TOPK,
    "sigmoid_topk": SIGMOID_TOPK,
    "expert_choice": EXPERT_CHOICE,
    "uniform": UNIFORM,
}


def find_rule(name: str) -> RoutingRule:
    """Find a routing rule: a built-in one, an entry point of the group `forge.routers`, or "module:attribute".

    Raises ValueError for an unknown name, a path to anything but a RoutingRule, and `gradient_scale`.
    """
    if name == "gradient_scale":
        rule = (
            "is not supported: it multiplies the layer's output in training and not in evaluation, so the two are "
            "different functions"
        )
        fix = "scale the learning rate of the experts, or use route_scale, which acts in both"
        raise invalid("router", "unsupported", name, rule, fix)
    found: object = find_registered("router", name, "forge.routers", _BUILT_IN)
    if not isinstance(found, RoutingRule):
        rule = f"must be a forge_moe.RoutingRule, and is a {type(found).__name__}"
        raise invalid("router", "type", name, rule, "make one from score, choose and weigh")
    return found


# ---- capacity


def expert_capacity(
    num_tokens: int | Tensor, top_k: int, num_experts: int, factor: float
) -> int | Tensor:
    """Tokens that an expert takes at most, over all slots of a call: ceil(factor T K / E).

    `factor` is read as a decimal, so that 1.1 x 1000 / 10 is 110 and not 111. num_tokens, without pads, may be a tensor
    on a device; the limit then is one too.
    """
    # 1.1 is stored as a little more than 11 / 10, and ceil would add a token: shrink by more than rounding.
    per_token = top_k * factor / num_experts * (1 - 1e-9)
    if isinstance(num_tokens, int):
        return math.ceil(num_tokens * per_token)
    return (num_tokens.double() * per_token).ceil().to(torch.int64)


def drop_over_capacity(
    ids: Tensor, weights: Tensor, num_experts: int, limit: int | Tensor, policy: str
) -> Tensor:
    """ids (T, K) with E for slots over the limit of their expert. No gradient, no host sync.

    policy "position" keeps earlier tokens (GShard), "probability" those with larger weights (T, K); equal ones by
    position. Dropped slots are neither computed nor sent, and the weights of the others are not raised. Only tokens of
    this process are counted, so under expert parallelism the limit holds per sending process.
    """
    flat = ids.reshape(-1)  # (T K,)
    if policy == "probability":
        by_weight = weights.detach().reshape(-1).sort(stable=True, descending=True).indices
        sorted_ids, order = flat[by_weight].sort(stable=True)
        order = by_weight[order]
    else:
        sorted_ids, order = flat.sort(stable=True)

    # Stable sorts: within an expert the slots to keep come first, so a slot's index counts from its expert.
    first_of_expert = torch.searchsorted(sorted_ids, sorted_ids)
    index = torch.arange(flat.numel(), device=ids.device) - first_of_expert
    kept = torch.where(index < limit, sorted_ids, num_experts)
    return torch.empty_like(flat).scatter_(0, order, kept).view(ids.shape)
