"""The loss of an optimizer step, and of an evaluation, in plain torch.

The loss of a step is a sum over the labels of all its micro-batches, divided by the sum of their
weights. Shapes: B sequences, S tokens, K modules of multi-token prediction, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .fusion import stream_with_images
from .model import Config, Weights, decoder, embed, feed_forward, head, mtp_module, norm, segments
from .moma import MomaLosses
from .positions import predicted_modalities
from .routers import RouterLosses, Routing, is_mixture, mixture, update_expert_bias
from .rows import Rows, Step

NO_LABEL = -100


@dataclass
class StepLoss:
    """The loss of a step, with the numbers of its row of metrics.jsonl."""

    total: Tensor  # scalar with a graph; its gradient is the gradient of the step
    columns: dict[str, float]  # "loss" and further columns as in docs/metrics.md
    margin: float  # smallest distance of a chosen expert's score from the best one not chosen
    state: Any  # what `after_step` needs, such as counts of experts


def label_sums(logits: Tensor, labels: Tensor, label_weights: Tensor) -> dict[str, Tensor]:
    """Return sums over the labels of a micro-batch, each label times its weight.

    logits (B, S, V), labels and their weights (B, S). `loss` is the cross-entropy, `z` the squared
    log-sum-exp of the logits (PaLM), and `smoothing` what label smoothing adds for each unit of its
    coefficient: the mean of -log p over the vocabulary (Szegedy et al. 2016) less the cross-entropy.
    """
    log_z = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    terms = {"loss": log_z - chosen, "z": log_z.square(), "smoothing": chosen - logits.mean(-1)}
    label_weights = torch.where(labels == NO_LABEL, 0.0, label_weights.to(logits.dtype))
    return {name: (term * label_weights).sum() for name, term in terms.items()}


def shifted(x: Tensor, by: int, fill: int) -> Tensor:
    """Move a sequence (B, S) `by` tokens to the left."""
    tail = x.new_full((x.size(0), min(by, x.size(1))), fill)
    return torch.cat([x[:, by:], tail], dim=1)


def later_labels(rows: Rows, k: int) -> tuple[Tensor, Tensor]:
    """Return labels and weights (B, S) of the tokens k after the next ones, in the same document."""
    labels = shifted(rows.labels, k, NO_LABEL)
    same = shifted(segments(rows.documents), k, -1) == segments(rows.documents)
    return torch.where(same, labels, NO_LABEL), shifted(rows.weights, k, 0)


Routings = dict[int, Routing]  # by layer


def logits_of(
    job: Config, weights: Weights, buffers: Weights, rows: Rows, training: bool, moma: MomaLosses
) -> tuple[list[Tensor], Routings]:
    """Return the logits (B, S, V) of the next token and, in training, of those after it; and the routing.

    Multi-token prediction and capacities are of training only. `moma` collects the losses of MoMa's routers.
    """
    config, routings = job["model"], {}
    valid = rows.documents >= 0

    def ff(prefix: str, layer: int, x: Tensor) -> Tensor:
        if not is_mixture(config, layer):
            return feed_forward(config, weights, prefix, x)
        y, routings[layer] = mixture(config, weights, buffers, prefix, x, valid, training)
        return y

    if config["name"] == "vlm":
        stream = stream_with_images(config, weights, rows, ff, moma, training)
    else:
        stream = embed(config, weights, rows.tokens)
        stream = decoder(config, weights, stream, rows.positions, rows.documents, ff)
    logits = [head(config, weights, norm(config, weights, "norm", stream))]
    for k in range(config["mtp"]["num_modules"] if training else 0):
        tokens = shifted(rows.tokens, k + 1, 0)
        stream = mtp_module(config, weights, k, stream, tokens, rows.positions, rows.documents, ff)
        logits.append(head(config, weights, norm(config, weights, f"mtp.{k}.norm", stream)))
    return logits, routings


def parts_of(job: Config, rows: Rows) -> dict[str, Tensor]:
    """Return the labels (B, S) bool that count in further columns, by the ends of their names.

    `source.NAME` where there are several, `modality.NAME` where images are predicted too.
    """
    names = sorted(job["data"]["sources"])  # numbered in this order
    parts = {}
    if len(names) > 1:
        for number, name in enumerate(names):
            parts[f"source.{name}"] = (rows.source == number)[:, None].expand_as(rows.labels)
    if job["model"]["name"] == "vlm":
        for name, here in predicted_modalities(job["model"], rows.labels).items():
            parts[f"modality.{name}"] = here
    return parts


def step_loss(job: Config, weights: Weights, buffers: Weights, step: Step) -> StepLoss:
    """Return the loss of an optimizer step over all readers and micro-batches."""
    options, modules = job["train"][job["train"]["loss"]], job["model"]["mtp"]["num_modules"]
    every = [rows for reader in step.micro_batches for rows in reader]
    divisor = math.fsum(rows.weights.double().sum().item() for rows in every) or 1.0
    routers = RouterLosses(job["model"], buffers, sum((r.documents >= 0).sum() for r in every))
    moma = MomaLosses()

    # The modules are trained with the same terms; the columns of the terms are of the next token only.
    factors = {"loss": 1.0, "z": options["z_loss"], "smoothing": options["label_smoothing"]}
    sums: dict[str, Any] = dict.fromkeys((*factors, "mtp", "mtp_trained"), 0.0)
    part_sums: dict[str, list[float]] = {}  # cross-entropy and weight of labels
    for together in zip_longest(*step.micro_batches):  # a micro-batch of each reader
        found = [
            (rows, *logits_of(job, weights, buffers, rows, True, moma)) for rows in together if rows
        ]
        for rows, (first, *later), _ in found:
            for name, value in label_sums(first, rows.labels, rows.weights).items():
                sums[name] += value
            for name, here in parts_of(job, rows).items():
                label_weights = torch.where(here, rows.weights, 0.0)
                loss = label_sums(first.detach(), rows.labels, label_weights)["loss"].item()
                sofar = part_sums.setdefault(name, [0.0, 0.0])
                sofar[0] += loss
                sofar[1] += label_weights.double().sum().item()
            for k, logits in enumerate(later, start=1):
                terms = label_sums(logits, *later_labels(rows, k))
                sums["mtp"] += terms["loss"] / modules
                sums["mtp_trained"] += sum(factors[n] * terms[n] for n in factors) / modules
        routers.add([(rows, routings) for rows, _, routings in found])
    means = {name: value / divisor for name, value in sums.items()}

    total = sum(factors[name] * means[name] for name in factors) + routers.total + moma.mean()
    columns = {"loss": means["loss"]}
    if options["z_loss"]:
        columns["loss.z_loss"] = options["z_loss"] * means["z"]
    if options["label_smoothing"]:
        columns["loss.label_smoothing"] = options["label_smoothing"] * means["smoothing"]
    if modules:
        columns["loss.mtp"] = means["mtp"]
        total = total + job["model"]["mtp"]["weight"] * means["mtp_trained"]
    numbers = {name: value.item() for name, value in columns.items()}
    for name, (loss, weight) in part_sums.items():
        numbers[f"loss.{name}"] = loss / weight if weight else math.nan
        if job["metrics"]["source_shares"] and name.startswith("source."):
            numbers[f"share.{name}"] = weight / divisor
    return StepLoss(
        total, numbers | routers.columns(), min(routers.margin, moma.margin), routers.counts
    )


def after_step(job: Config, buffers: Weights, loss: StepLoss, number: int, total: int) -> None:
    """Update buffers in place after step `number`, counted from 1, of the `total` steps of the run.

    It adds the column of the biases to those of the loss.
    """
    for layer, counts in loss.state.items():
        prefix = f"layers.{layer}.feed_forward."
        if f"{prefix}lagged_counts" in buffers:
            buffers[f"{prefix}lagged_counts"].copy_(counts)
        if job["model"]["moe"]["bias_update_rate"]:
            bias = buffers[f"{prefix}router.expert_bias"]
            update_expert_bias(job["model"]["moe"], bias, counts, number, total)
            loss.columns[f"moe.{layer}.max_bias"] = bias.abs().max().item()


@torch.no_grad()
def evaluation_loss(job: Config, weights: Weights, buffers: Weights, rows: list[Rows]) -> float:
    """Return the cross-entropy per label, without multi-token prediction and further terms."""
    total, divisor = 0.0, 0.0
    for some in rows:
        (logits,), _ = logits_of(job, weights, buffers, some, False, MomaLosses())
        total += label_sums(logits, some.labels, some.weights)["loss"].item()
        divisor += some.weights.double().sum().item()
    return total / divisor
