"""The truth: one process, fp32, torch's own loss, clipping and optimizers. Nothing of forge_parallel.

It goes through all micro-batches of all ranks one after another. Packed documents are run apart, each
as a row of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from batches import IGNORED, MicroBatch, batches
from cells import Cell
from torch import Tensor, nn
from training import ADAMW, MAX_NORM, SGD, STD, Run, decay_groups, gradients, model_config, weights

from forge_core import Transformer, initialise


def reference(cell: Cell) -> Run:
    """Train the cell's model on its batches in this process."""
    model = Transformer(model_config(cell))
    initialise(model, cell.seed, **STD)
    optimizer = _optimizer(cell, model)
    run = Run([], [], [], {})
    for step in batches(cell):
        parts = [part for rank in step for part in rank]
        labels = max(1, sum(part.num_valid for part in parts))
        loss = torch.zeros(())
        for part in parts:
            share = _loss_sum(model, part) / labels
            share.backward()
            loss += share.detach()
        run.losses.append(loss)
        run.gradients.append(gradients(model))
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).detach())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = weights(model)
    return run


def _loss_sum(model: nn.Module, part: MicroBatch) -> Tensor:
    if part.document_ids is None:
        return _row_loss(model, part.tokens, part.labels)
    losses = []
    for row, ids in enumerate(part.document_ids):
        for document in ids.unique():
            inside = ids == document
            losses.append(_row_loss(model, part.tokens[row, inside], part.labels[row, inside]))
    return torch.stack(losses).sum()


def _row_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens if tokens.ndim == 2 else tokens[None])  # (B, S, V)
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    if cell.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **SGD)
    groups = decay_groups(model, ADAMW["weight_decay"])
    return torch.optim.AdamW(groups, **ADAMW)
