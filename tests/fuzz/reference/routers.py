"""Mixtures of experts in plain torch: routers, experts, capacity, and the losses of routers.

`moe` is the table [model.moe] of a job. Shapes: T tokens without padding, E experts, K slots per token,
D width of a token, F width inside an expert. Choices are (T, E) bool and weights (T, E), 0 where a token
does not use an expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Config, Weights, linear, segments
from .rows import Rows

#: A distance of 2e-6 from the limit of a clamp is as close as one of 1e-4 between scores of experts.
CLAMPED = 50.0


@dataclass
class Routing:
    """The choices of one layer in one micro-batch of one reader."""

    logits: Tensor  # (T, E)
    probabilities: Tensor  # (T, E), which sum to 1 for each token
    weights: Tensor  # (T, E), of chosen experts
    chosen: Tensor  # (T, E) bool, before a capacity
    kept: Tensor  # (T, E) bool, after it
    margin: float  # smallest distance of a chosen score from the best one not chosen


def is_mixture(config: Config, layer: int) -> bool:
    """The first of every n layers above the dense ones is a mixture."""
    moe = config["moe"]
    above = layer - moe["first_dense_layers"]
    return moe["num_experts"] > 0 and above >= 0 and above % moe["every_n_layers"] == 0


def best(scores: Tensor, count: int) -> tuple[Tensor, float]:
    """Mark the `count` largest of each row (N, M), ties to the lower index; and return their margin."""
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    marks = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order[:, :count], True)
    if count in (0, scores.size(1)) or not len(scores):
        return marks, math.inf
    gaps = values[:, count - 1] - values[:, count]  # nan between excluded entries, which are -inf
    return marks, gaps.nan_to_num(nan=math.inf).min().item()


def choose_experts(moe: Config, scores: Tensor) -> tuple[Tensor, float]:
    """Choose top_k experts of each token, within the best groups (DeepSeek-V3, section 2.1.2)."""
    if moe["num_groups"] == 1:
        return best(scores, moe["top_k"])
    groups = scores.unflatten(1, (moe["num_groups"], -1))  # (T, G, E / G)
    size = 2 if moe["group_score"] == "top2_sum" else 1
    group_scores = groups.topk(min(size, groups.size(2)), dim=-1).values.sum(-1)
    allowed, group_margin = best(group_scores, moe["top_groups"])
    allowed = allowed[:, :, None].expand_as(groups).flatten(1)
    chosen, margin = best(scores.masked_fill(~allowed, -math.inf), moe["top_k"])
    return chosen, min(margin, group_margin)


def route(moe: Config, logits: Tensor, bias: Tensor | None, rows: list[int]) -> Routing:
    """Route tokens by their logits (T, E).

    `rows` are the numbers of tokens among which `expert_choice` chooses, one after another.
    """
    sigmoid = moe["router"] == "sigmoid_topk"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True)
    ranked = scores.detach() if bias is None else scores.detach() + bias

    if moe["router"] == "uniform":
        # Slot k of token t is slot t K + k of all, and experts take turns.
        slots = torch.arange(len(logits) * moe["top_k"]).view(-1, moe["top_k"])
        chosen = F.one_hot(slots % moe["num_experts"], moe["num_experts"]).sum(1).bool()
        margin = math.inf
    elif moe["router"] == "expert_choice":
        found = [choose_tokens(moe, part) for part in ranked.split(rows)]
        chosen, margin = torch.cat([c for c, _ in found]), min(m for _, m in found)
    else:
        chosen, margin = choose_experts(moe, ranked)

    weights = torch.where(chosen, scores, 0.0)
    if moe["normalize"] == "after_top_k" and moe["router"] != "expert_choice":
        # A softmax over the chosen ones is the same quotient, and exactly 1 for a single one.
        some = logits.masked_fill(~chosen, -math.inf)
        weights = weights / weights.sum(-1, keepdim=True) if sigmoid else some.softmax(-1)
    return Routing(logits, probabilities, weights * moe["route_scale"], chosen, chosen, margin)


def choose_tokens(moe: Config, scores: Tensor) -> tuple[Tensor, float]:
    """Expert choice (Zhou et al. 2022): each expert takes its T K / E best tokens."""
    count = -(-len(scores) * moe["top_k"] // moe["num_experts"])
    chosen, margin = best(scores.T, min(count, len(scores)))
    return chosen.T, margin


def apply_capacity(moe: Config, routing: Routing) -> None:
    """Drop the tokens that exceed the capacity of an expert (Switch Transformer, section 2.2)."""
    if moe["capacity_factor"] is None:
        return
    tokens, experts = routing.chosen.shape
    capacity = math.ceil(moe["capacity_factor"] * tokens * moe["top_k"] / experts)
    if moe["drop_policy"] == "position":
        routing.kept = routing.chosen & (routing.chosen.cumsum(0) <= capacity)
        return
    ranked = routing.weights.detach().masked_fill(~routing.chosen, -math.inf)
    first, margin = best(ranked.T, min(capacity, tokens))
    routing.kept = routing.chosen & first.T
    if not torch.equal(routing.kept, routing.chosen):
        routing.margin = min(routing.margin, margin)


def expert(
    moe: Config, weights: Weights, prefix: str, e: int, x: Tensor, routing: Routing
) -> Tensor:
    """Expert e of a mixture: (T, D) -> (T, D). Its matrices are stacked as (E, inputs, outputs).

    The derivative of a clamp is discontinuous at its limit: the distance from it, times CLAMPED, counts as a margin of `routing`.
    """

    def project(name: str, x: Tensor) -> Tensor:
        y = x @ weights[f"{prefix}{name}"][e]
        bias = weights.get(f"{prefix}{name}_bias")
        return y if bias is None else y + bias[e]

    if moe["activation"] == "swiglu":
        hidden = F.silu(project("gate_proj", x)) * project("up_proj", x)
    elif moe["activation"] == "gelu":
        hidden = F.gelu(project("up_proj", x))
    else:  # gpt-oss: columns of gate and up alternate
        gate_up, limit = project("gate_up_proj", x), moe["swiglu_limit"]
        distances = (gate_up.detach().abs() - limit).abs().flatten().tolist()
        routing.margin = min([routing.margin, *(CLAMPED * distance for distance in distances)])
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        hidden = gate * torch.sigmoid(moe["swiglu_alpha"] * gate) * (up + 1)
    return project("down_proj", hidden)


def shared_experts(moe: Config, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """Experts of every token, side by side in one feed-forward: (T, D) -> (T, D)."""
    up = linear(weights, f"{prefix}up_proj", x)
    if moe["activation"] == "swiglu":
        hidden = F.silu(linear(weights, f"{prefix}gate_proj", x)) * up
    else:
        hidden = F.gelu(up)
    y = linear(weights, f"{prefix}down_proj", hidden)
    return torch.sigmoid(linear(weights, f"{prefix}gate", x)) * y if moe["shared_gate"] else y


def mixture(
    config: Config,
    weights: Weights,
    buffers: Weights,
    prefix: str,
    x: Tensor,
    valid: Tensor,
    training: bool,
) -> tuple[Tensor, Routing]:
    """A mixture of experts: x (B, S, D) and valid (B, S) bool -> y (B, S, D), 0 on padding."""
    moe = config["moe"]
    tokens = x[valid]  # (T, D); padding is neither routed nor counted
    rows = valid.sum(1).tolist() if not training else [len(tokens)]
    logits = linear(weights, f"{prefix}router", tokens)
    routing = route(moe, logits, buffers.get(f"{prefix}router.expert_bias"), rows)
    if training:
        apply_capacity(moe, routing)

    y = torch.zeros_like(tokens)
    for e in range(moe["num_experts"]):
        used = routing.kept[:, e]
        out = expert(moe, weights, f"{prefix}experts.", e, tokens[used], routing)
        part = torch.zeros_like(tokens)
        part[used] = routing.weights[used, e, None] * out
        y = y + part
    if moe["num_shared_experts"]:
        y = y + shared_experts(moe, weights, f"{prefix}shared.", tokens)
    full = torch.zeros_like(x)
    full[valid] = y
    return full, routing


def sequences(valid: Tensor, documents: Tensor) -> Tensor:
    """Number the sequence of each token (T,): one number for each document of each sample."""
    numbers = segments(documents)
    samples = torch.arange(len(valid))[:, None] * (numbers.max() + 1)
    return (samples + numbers)[valid].unique(return_inverse=True)[1]


def router_losses(moe: Config, routing: Routing, sequence: Tensor, counts: Tensor) -> Tensor:
    """Return the weighted sum of the losses of a router, each a mean over its T tokens.

    `sequence` (T,) numbers the sequence of each token, `counts` (E,) are the tokens of each expert
    that the balance loss takes its fractions from, for scopes other than `sequence`.
    """
    z_loss = routing.logits.logsumexp(-1).square().mean()
    per_sequence = sequence_balance(routing, sequence)
    if moe["aux_scope"] == "sequence":
        balance = per_sequence
    else:
        fractions = counts / counts.sum().clamp(min=1)  # no counts before the first step
        balance = len(counts) * (fractions * routing.probabilities.mean(0)).sum()
    return (
        moe["aux_loss_weight"] * balance
        + moe["sequence_loss_weight"] * per_sequence
        + moe["z_loss_weight"] * z_loss
    )


def sequence_balance(routing: Routing, sequence: Tensor) -> Tensor:
    """The balance loss within each sequence, weighted by its length (DeepSeek-V3, equation 17)."""
    total = torch.zeros(())
    for number in sequence.unique():
        tokens = sequence == number
        counts = routing.chosen[tokens].sum(0)
        fractions = counts / counts.sum().clamp(min=1)
        means = routing.probabilities[tokens].mean(0)
        total = total + tokens.sum() * len(counts) * (fractions * means).sum()
    return total / len(sequence)


class RouterLosses:
    """The losses of all routers over the micro-batches of a step.

    The loss of a micro-batch counts by its tokens among the `tokens` of the step, without padding.
    """

    def __init__(self, config: Config, buffers: Weights, tokens: Tensor) -> None:
        self.moe, self.buffers, self.tokens = config["moe"], buffers, tokens
        self.total: Tensor | float = 0.0
        self.margin = math.inf
        self.counts: dict[int, Tensor] = {}  # tokens of each expert (E,), by layer
        self.entropies: dict[int, float] = {}
        self.kept: dict[int, int] = {}

    def add(self, micro_batches: list[tuple[Rows, dict[int, Routing]]]) -> None:
        """Add the micro-batches that all readers compute at the same time."""
        for _, routings in micro_batches:
            for layer, routing in routings.items():
                self.counts[layer] = self.counts.get(layer, 0) + routing.chosen.sum(0)
                self.kept[layer] = self.kept.get(layer, 0) + routing.kept.sum().item()
                p = routing.probabilities.detach()
                entropy = -torch.special.xlogy(p, p).sum().item()
                self.entropies[layer] = self.entropies.get(layer, 0.0) + entropy
                self.margin = min(self.margin, routing.margin)

        for rows, routings in micro_batches:
            sequence = sequences(rows.documents >= 0, rows.documents)
            for layer, routing in routings.items():
                if len(sequence):
                    losses = router_losses(
                        self.moe, routing, sequence, self.scope_counts(layer, routing)
                    )
                    self.total = self.total + losses * len(sequence) / self.tokens

    def scope_counts(self, layer: int, routing: Routing) -> Tensor:
        """Return the tokens of each expert in `aux_scope`, which are no function of the weights."""
        if self.moe["aux_scope"] == "global_batch":  # of all readers, from the start of the step on
            return self.counts[layer]
        if self.moe["aux_scope"] == "global_batch_lagged":
            return self.buffers[f"layers.{layer}.feed_forward.lagged_counts"]
        return routing.chosen.sum(0)

    def columns(self) -> dict[str, float]:
        """Return the columns moe.<layer>.* of the step."""
        found = {}
        for layer, counts in self.counts.items():
            total = max(counts.sum().item(), 1)
            mean = total / len(counts)
            bias = self.buffers.get(f"layers.{layer}.feed_forward.router.expert_bias")
            found |= {
                f"moe.{layer}.max_load": counts.max().item() / mean,
                f"moe.{layer}.min_load": counts.min().item() / mean,
                f"moe.{layer}.dead": (counts == 0).sum().item(),
                f"moe.{layer}.entropy": self.entropies[layer] / max(self.tokens.item(), 1),
                f"moe.{layer}.drop_rate": 1 - self.kept[layer] / total,
                f"moe.{layer}.max_bias": 0.0 if bias is None else bias.abs().max().item(),
            }
        return found


def update_expert_bias(moe: Config, bias: Tensor, counts: Tensor, number: int, total: int) -> None:
    """Move the bias (E,) of a layer toward an even load, in place (Wang et al. 2024).

    After step `number` of `total`, counted from 1. The warm-up is the first tenth of the run.
    """
    rate = moe["bias_update_rate"]
    if moe["bias_schedule"] == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * (number - 1) / total))
    if moe["bias_schedule"] == "linear_warmup":
        rate *= min(1.0, number / math.ceil(total / 10))
    counts = counts.double()
    bias += rate * torch.sign(counts.mean() - counts).to(bias.dtype)
    if moe["bias_center"]:
        bias -= bias.mean()
