"""MoMa: feed-forwards of experts in groups, one group for each modality (Lin et al. 2024, arXiv 2407.21770).

Shapes: B samples, S tokens, T tokens of a group, E experts of it, D width of a token. Left out: the Gumbel noise
(`gumbel_noise`), as it is random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Config, Weights, feed_forward, linear, segments
from .positions import groups_of
from .routers import best
from .rows import Rows


@dataclass
class MomaLosses:
    """Losses of MoMa's routers in a step, and the smallest margin of a choice.

    The loss of a layer and a group is a mean over the tokens of the group in the step: `sums` has the mean of each
    micro-batch times its tokens, over all layers, `counts` the tokens of each micro-batch.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)  # by group
    counts: dict[str, int] = field(default_factory=dict)  # by group
    margin: float = math.inf

    def count(self, groups: dict[str, Tensor]) -> None:
        """Count the tokens of a micro-batch; groups are masks (B, S) without padding."""
        for group, here in groups.items():
            self.counts[group] = self.counts.get(group, 0) + int(here.sum())

    def add(self, group: str, mean: Tensor, count: int) -> None:
        """Add the mean loss of one layer over `count` tokens of a micro-batch."""
        self.sums[group] = self.sums.get(group, torch.zeros(())) + mean * count

    def mean(self) -> Tensor | float:
        """Return the sum of the losses of all layers and groups."""
        return sum(loss / self.counts[group] for group, loss in self.sums.items())


def choose_by_token(options: Config, logits: Tensor, losses: MomaLosses, group: str) -> Tensor:
    """Token choice: logits (T, E) -> gates (T, E), 0 for experts that are not chosen.

    The balance loss is that of the Switch Transformer over the tokens of the group in the micro-batch,
    E sum_e f_e P_e with the fraction f_e of all T K choices, 1 for an even load.
    """
    num_experts, top_k = logits.size(1), options["top_k"]
    scores = logits.softmax(dim=-1)
    chosen, margin = best(scores.detach(), top_k)
    losses.margin = min(losses.margin, margin)
    fractions = chosen.sum(dim=0) / (len(logits) * top_k)
    balance = num_experts * (fractions * scores.mean(dim=0)).sum()
    losses.add(group, options["balance_loss"] * balance, len(logits))
    return scores * chosen


def choose_by_expert(
    options: Config, logits: Tensor, scopes: list[list[int]], losses: MomaLosses
) -> Tensor:
    """Expert choice: each expert takes the capacity_factor * n / E tokens, rounded up, of the n of a scope with the
    largest sigmoid gates: logits (T, E) -> gates (T, E), 0 for experts that did not choose the token."""
    gates = logits.sigmoid()
    chosen = torch.zeros_like(gates, dtype=torch.bool)
    for tokens in scopes:
        quota = math.ceil(options["capacity_factor"] * len(tokens) / gates.size(1))
        of_scope, margin = best(gates[tokens].detach().T, min(quota, len(tokens)))
        chosen[tokens] = of_scope.T
        losses.margin = min(losses.margin, margin)
    return gates * chosen


def expert_weights(weights: Weights, prefix: str, expert: int) -> Weights:
    """Return the weights of one expert by the names of a feed-forward.

    Experts are modules `each.0`, `each.1`, or stacks (E, inputs, outputs) with biases (E, outputs).
    """
    found = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        if f"{prefix}{name}" in weights:
            found[f"{name}.weight"] = weights[f"{prefix}{name}"][expert].T
        if f"{prefix}{name}_bias" in weights:
            found[f"{name}.bias"] = weights[f"{prefix}{name}_bias"][expert]
        for kind in ("weight", "bias"):
            if f"{prefix}each.{expert}.{name}.{kind}" in weights:
                found[f"{name}.{kind}"] = weights[f"{prefix}each.{expert}.{name}.{kind}"]
    return found


def auxiliary_logits(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """Predict from the detached tokens (T, D) which experts choose them: (T, E), above 0 for yes."""
    hidden = F.silu(linear(weights, f"{prefix}auxiliary.0", x.detach()))
    return linear(weights, f"{prefix}auxiliary.2", hidden)


def scopes_of(options: Config, rows: Rows, here: Tensor) -> list[list[int]]:
    """Return the tokens among which an expert chooses, as indices into the tokens of a group (`here` (B, S) bool)."""
    if options["scope"] == "micro_batch":
        return [list(range(int(here.sum())))]
    numbers, scopes = segments(rows.documents), {}
    for index, (b, i) in enumerate(here.nonzero().tolist()):
        scopes.setdefault((b, int(numbers[b, i])), []).append(index)
    return list(scopes.values())


def moma(
    config: Config,
    weights: Weights,
    prefix: str,
    x: Tensor,
    rows: Rows,
    losses: MomaLosses,
    training: bool,
) -> Tensor:
    """A feed-forward of experts in groups, one group for each modality: (B, S, D) -> (B, S, D), 0 on padding."""
    options, out = config["fusion"]["moma"], torch.zeros_like(x)
    for group, of_group in groups_of(config, rows.tokens, options["share"]).items():
        here = of_group & (rows.documents >= 0)
        if not here.any():
            continue
        name = f"{prefix}groups.{group}."
        tokens = x[here]  # (T, D)
        logits = linear(weights, f"{name}router", tokens)

        if options["router"] == "token_choice":
            gates = choose_by_token(options, logits, losses, group)
        elif options["router"] == "expert_choice" or training:
            gates = choose_by_expert(options, logits, scopes_of(options, rows, here), losses)
            if options["router"] == "auxiliary_router":
                predicted = auxiliary_logits(weights, name, tokens)
                target = (gates.detach() != 0).to(predicted.dtype)
                loss = F.binary_cross_entropy_with_logits(predicted, target)
                losses.add(group, loss, len(tokens))
        else:
            predicted = auxiliary_logits(weights, name, tokens)
            losses.margin = min(losses.margin, float(predicted.abs().min()))
            gates = logits.sigmoid() * (predicted > 0)

        if options["normalize"]:
            total = gates.sum(dim=-1, keepdim=True)
            gates = gates / torch.where(total > 0, total, 1.0)
        y = torch.zeros_like(tokens)
        for expert in range(gates.size(1)):
            each = feed_forward(
                config, expert_weights(weights, f"{name}experts.", expert), "", tokens
            )
            y = y + gates[:, expert : expert + 1] * each
        out = out.masked_scatter(here[..., None], y)
    return out
