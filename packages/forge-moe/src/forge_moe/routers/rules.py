"""Rules of routing: from logits to chosen experts and their weights.

A rule is a score, a choice without gradient, and differentiable weights of a given choice. They are
separate functions so that a recomputed forward can weigh the recorded choice.

Shapes: T tokens, E experts, K slots per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_moe.config import RouterConfig
from forge_moe.protocols import Choose, Score, Weigh
from forge_moe.routers.select import top_k_ids, within_best_groups


class RoutingRule(NamedTuple):
    """Three functions (`forge_moe.protocols`) and four facts about them.

    `normalized`: the scores of a token sum to 1. `causal` is False if a token's experts depend on other
    tokens: in eval `choose` then gets one row (B, S, D) at a time, and a KV cache is refused.
    `max_slots(T, config)` bounds the slots that go somewhere, if they are fewer than ids has.
    `routes_all_slots` promises that every slot of a valid token goes somewhere.
    """

    score: Score
    choose: Choose
    weigh: Weigh
    normalized: bool = False
    causal: bool = True
    max_slots: Callable[[int, RouterConfig], int] | None = None
    routes_all_slots: bool = False


def _choose_by_token(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    allowed = within_best_groups(scores, config.num_groups, config.top_groups, config.group_score)
    return top_k_ids(allowed, config.top_k)


def _weigh_softmax(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    if config.normalize == "before_top_k":
        return scores.gather(1, ids) * config.route_scale
    # The softmax of the chosen logits is the renormalised softmax, and cannot underflow to 0 / 0.
    return logits.gather(1, ids).softmax(dim=-1) * config.route_scale


def _weigh_sigmoid(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    chosen = scores.gather(1, ids)  # (T, K)
    if config.normalize == "after_top_k":
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * config.route_scale


def _choose_by_expert(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    """Each expert takes its T K / E best tokens, T without pads; a token has E slots, most of them
    nowhere."""
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
    return ids.masked_fill(~taken.T, num)


def _tokens_per_expert(tokens: int, config: RouterConfig) -> int:
    return min(tokens, -(-tokens * config.top_k // config.num_experts))


def _weigh_by_score(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    return scores.gather(1, ids) * config.route_scale


def _round_robin(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    first = valid.cumsum(0).sub(1).unsqueeze(1) * config.top_k  # (T, 1), counting valid tokens
    return (first + torch.arange(config.top_k, device=scores.device)) % config.num_experts


def _softmax(logits: Tensor) -> Tensor:
    return F.softmax(logits, dim=-1)


SOFTMAX_TOPK = RoutingRule(
    _softmax, _choose_by_token, _weigh_softmax, normalized=True, routes_all_slots=True
)
"""Softmax, k best experts of the token: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2."""

SIGMOID_TOPK = RoutingRule(torch.sigmoid, _choose_by_token, _weigh_sigmoid, routes_all_slots=True)
"""Sigmoid scores, the bias only selects, the weights come from unbiased scores (DeepSeek-V3, 2.1.2)."""

EXPERT_CHOICE = RoutingRule(
    _softmax,
    _choose_by_expert,
    _weigh_by_score,
    normalized=True,
    causal=False,
    max_slots=lambda tokens, config: _tokens_per_expert(tokens, config) * config.num_experts,
)
"""Each expert chooses tokens (Zhou et al. 2022): in training among all of a call, in eval within each row.
A token's experts depend on later tokens, so it scores rows but cannot generate. ids has E slots per
token, of which T K in sum go somewhere."""

UNIFORM = RoutingRule(
    _softmax, _round_robin, _weigh_softmax, normalized=True, causal=False, routes_all_slots=True
)
"""Experts round-robin, independent of the scores: perfect balance for benchmarks. Over all tokens of a call in training,
over each row in eval; a token's experts depend on how many came before it, so it scores rows but cannot generate."""
