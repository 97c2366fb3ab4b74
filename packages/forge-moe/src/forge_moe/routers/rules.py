"""The rules of routing: from logits to chosen experts and their weights.

A rule is a score, a choice that needs no gradient, and differentiable weights of a given choice. Apart, a
recorded choice can be weighed again when a forward is recomputed.

Shapes: T tokens, E experts, K slots per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_moe.config import RouterConfig
from forge_moe.routers.select import top_k_ids, within_best_groups

Choose = Callable[[Tensor, RouterConfig, Tensor], Tensor]
Weigh = Callable[[Tensor, Tensor, Tensor, RouterConfig], Tensor]


class Rule(NamedTuple):
    """score(logits (T, E)) -> (T, E) at or above 0; choose(selection scores (T, E), config, valid (T,)
    bool) -> ids (T, K), no gradient, E = nowhere; weigh(logits, scores, ids (T, K) in 0..E-1, config) ->
    (T, K), differentiable. What `choose` sees is the score plus the expert bias, if there is one; `weigh`
    never sees the bias. `normalised` says that scores of a token sum to 1; `causal` is False where a token's
    experts depend on other tokens: in eval `choose` then gets one row (B, S, D) at a time, and there is no
    decoding from a cache; `most_rows(T, config)` bounds the slots that go somewhere, where that is
    fewer than ids has; `places_all` promises that every slot of a valid token goes somewhere."""

    score: Callable[[Tensor], Tensor]
    choose: Choose
    weigh: Weigh
    normalised: bool = False
    causal: bool = True
    most_rows: Callable[[int, RouterConfig], int] | None = None
    places_all: bool = False


def _best_of_token(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
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


def _best_of_expert(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    """Each expert takes its T K / E best tokens, T without pads; a token has E slots, most of them
    nowhere."""
    tokens, num = scores.shape
    share = _share(tokens, config)
    masked = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
    best = top_k_ids(masked.T, share)  # (E, share): tokens, the best first
    limit = (
        valid.sum() * config.top_k + num - 1
    ) // num  # `share` of the valid tokens, on the device
    counts = torch.arange(share, device=scores.device) < limit
    taken = torch.zeros(num, tokens, dtype=torch.bool, device=scores.device)
    taken.scatter_(1, best, counts.expand(num, share))
    ids = torch.arange(num, device=scores.device).expand(tokens, num)
    return ids.masked_fill(~taken.T, num)


def _share(tokens: int, config: RouterConfig) -> int:
    return min(tokens, -(-tokens * config.top_k // config.num_experts))


def _weigh_all(logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    return scores.gather(1, ids) * config.route_scale


def _in_turn(scores: Tensor, config: RouterConfig, valid: Tensor) -> Tensor:
    place = valid.cumsum(0).sub(1).unsqueeze(1) * config.top_k  # (T, 1) of valid tokens
    return (place + torch.arange(config.top_k, device=scores.device)) % config.num_experts


def _softmax(logits: Tensor) -> Tensor:
    return F.softmax(logits, dim=-1)


SOFTMAX_TOPK = Rule(_softmax, _best_of_token, _weigh_softmax, normalised=True, places_all=True)
"""Softmax, k best experts of the token: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2."""

SIGMOID_TOPK = Rule(torch.sigmoid, _best_of_token, _weigh_sigmoid, places_all=True)
"""Sigmoid scores, the bias only selects, the weights come from unbiased scores (DeepSeek-V3, 2.1.2)."""

EXPERT_CHOICE = Rule(
    _softmax,
    _best_of_expert,
    _weigh_all,
    normalised=True,
    causal=False,
    most_rows=lambda tokens, config: _share(tokens, config) * config.num_experts,
)
"""Each expert chooses tokens (Zhou et al. 2022): in training among all of a call, in eval within each row.
A token's experts depend on later tokens, so it scores rows but cannot generate. ids has E slots per
token, of which T K in all go somewhere."""

UNIFORM = Rule(_softmax, _in_turn, _weigh_softmax, normalised=True, places_all=True)
"""Experts in turn, whatever the scores: perfect balance for benchmarks."""
