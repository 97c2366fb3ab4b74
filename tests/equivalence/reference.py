"""The truth: one process, fp32, torch's own loss, clipping and optimizers. Nothing of forge_parallel.

It goes through all micro-batches of all ranks one after another. Packed documents are run apart, each
as a row of its own; in mixtures, where losses count over a micro-batch, in their rows. Router losses are
added to the loss. Batches that a loss counts over ranks are run as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import training
from batches import IGNORED, PICTURE, ROWS, STEPS, MicroBatch, batches, together
from cells import AVERAGING, BY_NAME, FEATURES, Cell
from optimizers import Recorded, plain
from settings import set_up
from torch import Tensor, nn

from forge_core import initialize
from forge_moe import Router, aux_losses, update_expert_bias
from forge_testing import device

# Routers of two layouts differ by rounding, some 1e-6: where scores are nearer, so may their choices.
MARGIN = 1e-4
SEEDS = 60


def reference(cell: Cell) -> training.Run:
    """Train the cell's model on its batches in this process.

    With mixtures the seed is the first from the cell's on in which no router has a close choice.
    """
    set_up(tf32=False)
    first = cell.seed + FEATURES[cell.feature].first_seed
    for seed in range(first, first + SEEDS):
        run, margin = _train(replace(cell, seed=seed))
        if margin > MARGIN:
            return run
    raise AssertionError(
        f"{cell.name}: {SEEDS} seeds have a choice of experts closer than {MARGIN}"
    )


def _train(cell: Cell) -> tuple[training.Run, float]:
    """The run, and the smallest margin between the last expert chosen and the first that was not."""
    model = training.build_model(cell, aux="return", base_dtype=None)
    initialize(model, cell.seed, **training.STD)
    if FEATURES[cell.feature].lora:  # the values of a base in bf16, in fp32
        for parameter in (p for p in model.parameters() if not p.requires_grad):
            parameter.data = parameter.data.bfloat16().float()
    model.to(device())
    optimizer = _optimizer(cell, model)
    record = Recorded(model) if cell.optimizer == "lion" else None
    run = training.Run(seed=cell.seed)
    with _Margins() as margins:
        for number, step in enumerate(batches(cell)):
            run.losses.append(_forward_backward(cell, model, _parts(cell, step)))
            run.gradients.append(training.gradients(model, cell))
            run.norms.append(
                nn.utils.clip_grad_norm_(model.parameters(), training.MAX_NORM).detach()
            )
            run.routes.append(training.routes(model))
            if record is not None:
                record()
            optimizer.step()
            optimizer.zero_grad()
            update_expert_bias(model, number, STEPS)
        if FEATURES[cell.feature].evaluated:
            run.losses.append(_evaluated(cell, model))
    if cell.optimizer in AVERAGING:
        optimizer.eval()
    run.weights = training.weights(model)
    return run, margins.least


def _parts(cell: Cell, step: list[list[MicroBatch]]) -> list[MicroBatch]:
    """The micro-batches of a step, in the order in which the model sees them."""
    parts = [part for rank in step for part in rank]
    if FEATURES[cell.feature].moe.get("aux_scope") == "global_batch":
        parts = [together(ranks) for ranks in zip(*step)]
    return [part.to(device()) for part in parts]


def _forward_backward(cell: Cell, model: nn.Module, parts: list[MicroBatch]) -> Tensor:
    labels = max(1, sum(part.num_valid for part in parts))
    tokens = sum(part.num_tokens for part in parts)
    total = torch.zeros((), device=device())
    for part in parts:
        loss = _loss_sum(cell, model, part) / labels
        total += loss.detach()
        if FEATURES[cell.feature].moe:
            loss = loss + aux_losses(model).total * (part.num_tokens / tokens)
        loss.backward()
    return total


@torch.no_grad()
def _evaluated(cell: Cell, model: nn.Module) -> Tensor:
    """Mean loss of the last step's rows in eval mode, one row at a time."""
    parts = [part.to(device()) for rank in batches(cell)[-1] for part in rank]
    model.eval()
    rows = [part.rows(slice(r, r + 1)) for part in parts for r in range(ROWS)]
    total = sum(_row_loss(cell, model, row.tokens, row.labels, **row.keywords) for row in rows)
    return torch.as_tensor(total) / sum(part.num_valid for part in parts)


def _loss_sum(cell: Cell, model: nn.Module, part: MicroBatch) -> Tensor:
    pictures = {name: ragged.values for name, ragged in part.extras.items()}
    if part.document_ids is None or FEATURES[cell.feature].moe:
        return _row_loss(cell, model, part.tokens, part.labels, **part.keywords, **pictures)
    losses = []
    for row, ids in enumerate(part.document_ids):
        for document in ids.unique():
            inside = ids == document
            tokens, labels = part.tokens[row, inside], part.labels[row, inside]
            number = int((tokens == PICTURE).sum()) // FEATURES[cell.feature].places
            mine = {name: values[:number] for name, values in pictures.items()}
            pictures = {name: values[number:] for name, values in pictures.items()}
            losses.append(_row_loss(cell, model, tokens, labels, **mine))
    return torch.stack(losses).sum()


def _row_loss(
    cell: Cell, model: nn.Module, tokens: Tensor, labels: Tensor, **keywords: Tensor
) -> Tensor:
    if FEATURES[cell.feature].ahead:
        return _with_ahead(cell, model, *(x.reshape(-1, x.size(-1)) for x in (tokens, labels)))
    logits = model(tokens if tokens.ndim == 2 else tokens[None], **keywords)  # (B, S, V)
    rows, targets = logits.flatten(0, 1), labels.flatten()
    terms = FEATURES[cell.feature].terms
    smoothing = terms.get("label_smoothing", 0.0)
    loss = F.cross_entropy(
        rows, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
    if "z_loss" in terms:
        loss = loss + terms["z_loss"] * rows[targets != IGNORED].logsumexp(-1).square().sum()
    return loss


def _with_ahead(cell: Cell, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of the next token of rows of one document each, with the gradient of further ones, too."""
    depths, length = FEATURES[cell.feature].ahead, tokens.size(1)
    shifted = [F.pad(tokens[:, k:], (0, k))[:, :length] for k in range(1, depths + 1)]
    logits = model(tokens, next_tokens=torch.stack(shifted, 1)).chunk(depths + 1)
    losses = [
        F.cross_entropy(
            out[:, : max(0, length - k)].flatten(0, 1),
            labels[:, k:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        for k, out in enumerate(logits)
    ]
    further = training.AHEAD_WEIGHT * torch.stack(losses[1:]).mean()
    return losses[0] + further - further.detach()


def _optimizer(cell: Cell, model: nn.Module) -> Any:
    if cell.optimizer in BY_NAME:
        return plain(cell.optimizer, model)
    if cell.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **training.SGD)
    groups = training.decay_groups(model, training.ADAMW["weight_decay"])
    return torch.optim.AdamW(groups, **training.ADAMW)


class _Margins:
    """Watches every choice of every router while it is open."""

    def __init__(self) -> None:
        self.least = float("inf")
        choose = Router._choose

        def watched(router: Any, scores: Tensor, valid: Tensor | None, rows: int) -> Tensor:
            selection = scores if router.expert_bias is None else scores + router.expert_bias
            share = router.config.top_k
            some = selection if valid is None else selection[valid]  # (T, E)
            if not router.rule.causal:  # experts choose
                some, share = some.T, -(-some.size(0) * share // some.size(1))
            best = some.topk(share + 1).values  # (T, K + 1)
            self.least = min(self.least, float((best[:, -2] - best[:, -1]).min()))
            return choose(router, scores, valid, rows)

        self._patch = mock.patch.object(Router, "_choose", watched)

    def __enter__(self) -> _Margins:
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
